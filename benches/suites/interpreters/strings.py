# Lines of a text: split, join, a pattern with a function, formats, replace, a counter.
import re
import sys
from collections import Counter

counts, total, pattern = Counter(), 0, re.compile(r"\b([a-m]\w*)\s(\w+)")
with open(sys.argv[1]) as file:
    for number, line in enumerate(file):
        words = line.strip().title().split()
        counts.update(word[:2] for word in words if not word.startswith("E"))
        swapped = pattern.sub(lambda m: f"{m[2]}-{m[1].upper()}", line)
        joined = ",".join(reversed(words)) + "%6.2f|%s" % (number / 7, swapped.replace("e", "3"))
        total = (total * 31 + ord(joined[number % len(joined)]) + joined.count("T")) % 1000003
        total += len(joined.encode()) + joined.isascii()
print(total, sorted(counts.items())[:6], sum(counts.values()))
