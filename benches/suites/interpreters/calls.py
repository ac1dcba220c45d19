# Classes, recursive generators, keyword arguments, a decorator, recursion.
import functools
import sys

class Node:
    def __init__(self, value, left=None, right=None):
        self.value, self.left, self.right = value, left, right
    def __iter__(self):
        if self.left: yield from self.left
        yield self.value
        if self.right: yield from self.right

class Summed(Node):
    def total(self, *, by=1): return sum(self) * by

def build(low, high):
    middle = (low + high) // 2
    return Summed(middle, build(low, middle), build(middle + 1, high)) if low < high else None

def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **options):
        calls[function.__name__] = calls.get(function.__name__, 0) + 1
        return function(*args, **options)
    return wrapper

@logged
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)

calls, result = {}, 0
for i in range(int(sys.argv[1])):
    result = (result + build(i, i + 40).total(by=3) + fib(i % 13)) % 1000003
print(result, calls)
