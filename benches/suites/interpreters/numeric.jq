# Integers and floats through reduce.
reduce range(1; $n) as $i ([0, 1, 0.5];
    [(.[0] + $i * 7919 % 1009) % 1000003, (.[1] * 16807 + $i) % 2147483647,
     if .[2] > 1 then .[2] / 3 else .[2] * 1.7 + ($i | sqrt | . - floor) end])
| .[2] |= (. * 1000000 | floor)
