-- The Mandelbrot set in floats, and a generator of random numbers in integers.
local n, inside, mixed = tonumber(arg[1]), 0, 1
for y = 0, n - 1 do
  for x = 0, n - 1 do
    local cr, ci, zr, zi, k = 2.0 * x / n - 1.5, 2.0 * y / n - 1.0, 0.0, 0.0, 0
    while k < 100 and zr * zr + zi * zi < 4.0 do
      zr, zi, k = zr * zr - zi * zi + cr, 2.0 * zr * zi + ci, k + 1
    end
    inside = inside + k
    mixed = (mixed * 16807 + k * (x ~ y)) % 2147483647
  end
end
print(inside, mixed, inside / (n * n))
