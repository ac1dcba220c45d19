# Lines of a text: split, join, explode, regular expressions, interpolation.
reduce inputs as $line ({sum: 0, words: 0};
    ($line | ascii_upcase | split(" ") | map(select(length > 2) | .[1:] + .[:1])) as $words
    | .words += ($words | length)
    | ([$line | match("[aeiou]+[a-m]"; "g").offset] | add) as $offsets
    | ("\($words[0]):\($words)" | ltrimstr("E") | test("TH|\\dX")) as $found
    | .sum = (.sum * 31 + ($words | join("-") | explode | add) + $offsets
        + if $found then 1 else 0 end) % 1000003)
