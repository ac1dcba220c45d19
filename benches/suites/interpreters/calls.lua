-- Methods found through two metatables, closures with varargs, protected calls, recursion.
local Shape, Square = {}, {}
Shape.__index, Square.__index = Shape, setmetatable(Square, Shape)
function Shape.new(class, size) return setmetatable({ size = size }, class) end
function Shape:area() return 3 * self.size * self.size end
function Shape:scaled(by) return self:area() * by % 1009 end
function Square:area() return self.size * self.size end

local function counter(step)
  local count = 0
  return function(...) count = count + step * select("#", ...); return count end
end
local function fib(n) if n < 2 then return n end return fib(n - 1) + fib(n - 2) end

local shapes, tick, sum = { Shape:new(3), Shape.new(Square, 4) }, counter(3), 0
for i = 1, tonumber(arg[1]) do
  local shape = shapes[i % 2 + 1]
  local ok, value = pcall(shape.scaled, shape, i)
  sum = (sum + value + tick(i, ok) + fib(i % 10)) % 1000003
end
print(sum, tick(), fib(20))
