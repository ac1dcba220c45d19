# Recursive functions of one to four arguments, a filter as an argument, until.
def fib: if . < 2 then . else (. - 1 | fib) + (. - 2 | fib) end;
def hanoi($n; $from; $to; $by):
    if $n == 0 then 0
    else hanoi($n - 1; $from; $by; $to) + $from * $to + hanoi($n - 1; $by; $to; $from) end;
def twice(f): f | f;
def collatz:
    def step: if . % 2 == 0 then . / 2 else 3 * . + 1 end;
    [., 0] | until(.[0] == 1; [(.[0] | step), .[1] + 1]) | .[1];
reduce range(1; $n) as $i (0;
    (twice(. + $i | . * 3 % 1000003) + ($i % 10 | fib) + hanoi($i % 5; 1; 2; 3) + ($i | collatz))
    % 1000003)
