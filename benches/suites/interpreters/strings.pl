# Lines of a text: tr, s///, captures in a loop, split and join, sprintf, substr.
use strict; use warnings;
my ($vowels, $sum, %seen) = (0, 0);
while (my $line = <>) {
    chomp $line;
    $vowels += ($line =~ tr/aeiou//);
    $line =~ s/\b(\w)(\w+)\b/\u$1$2/g;
    my @words = grep { length > 3 } split ' ', $line;
    $seen{lc $1}++ while $line =~ /([A-Z][a-m]+)\b/g;
    my $joined = sprintf '%-20.20s|%s', join('-', reverse @words), scalar reverse $line;
    my $letter = substr $joined, $sum % length $joined, 1;
    $sum = ($sum * 31 + ord($letter) + length $joined) % 1000003;
}
my $pairs = 0;
$pairs += $seen{$_} * length $_ for keys %seen;
print "$vowels $sum $pairs ", join(',', map { "$_=$seen{$_}" } (sort keys %seen)[0 .. 5]), "\n";
