#!/bin/sh -e
# A script as a guest: its interpreter line has an argument; it starts programs, reads its input and
# sets its status.
echo "script with $# arguments: $*"
while read -r first rest; do
    echo "line: $first ($rest)"
done
for i in 1 2 3; do
    printf '%s ' "$i" | tr 1-3 a-c
done
echo
(exit 3) || echo "subshell gave $?"
exit 12
