# Objects with inheritance, closures, recursion with four arguments.
use strict; use warnings;
package Stack {
    sub new { my ($class, %options) = @_; return bless { items => [], %options }, $class }
    sub push { my ($self, $x) = @_; push @{ $self->{items} }, $x; return $self }
    sub pop { my $self = shift; return pop @{ $self->{items} } }
}
package Doubled { our @ISA = 'Stack'; sub push { $_[0]->SUPER::push(2 * $_[1]) } }
package main;
sub hanoi {
    my ($n, $from, $to, $by) = @_;
    return 0 if $n == 0;
    return hanoi($n - 1, $from, $by, $to) + $from * $to + hanoi($n - 1, $by, $to, $from);
}
my ($n, $sum, @stacks) = (shift, 0, Stack->new, Doubled->new(name => 'd'));
my @steps = map { my $k = $_; sub { $k += shift; $k % 97 } } 1 .. 7;
for my $i (1 .. $n) {
    my $stack = $stacks[$i % 2]->push($i)->push($steps[$i % 7]->($i));
    $sum = ($sum + $stack->pop + $stack->pop + hanoi($i % 5, 1, 2, 3)) % 1000003;
}
print "$sum\n";
