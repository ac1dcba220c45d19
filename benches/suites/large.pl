# Writes a C file of many functions of changing shape, for measuring a compiler:
#     perl large.pl [FUNCTIONS]
# The file is the same in every run.
use strict;
my $count = shift // 400;
my $state = 12345;
# A random number below the argument, by a linear congruential generator.
sub draw { $state = ($state * 1103515245 + 12345) & 0x7fffffff; return ($state >> 8) % $_[0]; }
# A variable, an element or a constant.
sub term {
    my $t = draw(6);
    return $t == 4 ? draw(1000) : ('a', 'b', 'c', 'table[a & 63]', '', 'x')[$t];
}
# An expression whose tree has the depth of the argument.
sub value {
    my $d = shift;
    return term() if $d == 0;
    my @o = ('+', '-', '*', '^', '&', '|');
    return '(' . value($d - 1) . ' ' . $o[draw(6)] . ' ' . value($d - 1) . ')';
}
print "static unsigned table[64];\nunsigned counter;\n";
for my $f (0 .. $count - 1) {
    print "unsigned f$f(unsigned a, unsigned b, const unsigned char *text)\n{\n";
    print "    unsigned c = a ^ ", draw(1000), ", x = b;\n";
    for (1 .. 2 + draw(4)) {
        my $shape = draw(5);
        if ($shape == 0) {
            print "    for (x = 0; x < (a & 15) + 1; x++) { c += ", value(2),
                "; table[x & 63] ^= c; }\n";
        } elsif ($shape == 1) {
            print "    if (", value(1), " > ", value(1), ") c = ", value(3),
                "; else b = ", value(2), ";\n";
        } elsif ($shape == 2) {
            print "    switch (c & 7) {\n",
                map({ "    case $_: c ^= " . value(1) . "; break;\n" } 0 .. 5),
                "    default: b += ", value(2), "; }\n";
        } elsif ($shape == 3) {
            print "    while (*text) { c = c * 31 + *text++; if (c % ", 3 + draw(9), " == 0) b ^= ",
                value(1), "; }\n";
        } else {
            print "    table[(b >> 3) & 63] = ", value(3), "; counter += c;\n";
        }
    }
    print "    return ", ($f > 0 ? 'f' . draw($f) . "(c, b, text) + " : ''), "c;\n}\n";
}
