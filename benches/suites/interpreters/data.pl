# Breadth-first search over hashes of arrays, then sorts of the distances.
use strict; use warnings;
my ($size, $sum) = (20000, 0);
for my $round (1 .. shift) {
    my (%edges, %by, @queue);
    push @{ $edges{$_} }, ($_ * 3 + $round) % $size, ($_ * 7919 + 5) % $size for 0 .. $size - 1;
    my %distance = (0 => 0);
    push @queue, 0;
    while (defined(my $node = shift @queue)) {
        for my $next (grep { !exists $distance{$_} } @{ $edges{$node} }) {
            $distance{$next} = $distance{$node} + 1;
            push @queue, $next;
        }
    }
    my @far = sort { $distance{$b} <=> $distance{$a} || $a cmp $b } keys %distance;
    push @{ $by{ $distance{$_} } }, $_ for @far;
    delete @distance{ @far[0 .. 9] };
    $sum = ($sum * 3 + $by{$_}[-1] * @{ $by{$_} }) % 1000003 for sort { $a <=> $b } keys %by;
    $sum += keys %distance;
}
print "$sum\n";
