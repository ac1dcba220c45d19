# Four bodies under gravity in floats, random numbers in integers, a power in big integers.
Body = Struct.new(:x, :y, :vx, :vy, :mass)
bodies = [Body.new(0.0, 0.0, 0.0, 0.0, 10.0), Body.new(4.0, 0.0, 0.0, 1.5, 1.0),
          Body.new(0.0, 7.0, -1.2, 0.0, 0.5), Body.new(-9.0, 0.0, 0.0, -1.0, 0.1)]
seed = 42
ARGV[0].to_i.times do |step|
  bodies.combination(2) do |a, b|
    dx, dy = a.x - b.x, a.y - b.y
    pull = 0.001 / ((dx * dx + dy * dy + 0.01) * Math.sqrt(dx * dx + dy * dy + 0.01))
    a.vx -= dx * b.mass * pull; a.vy -= dy * b.mass * pull
    b.vx += dx * a.mass * pull; b.vy += dy * a.mass * pull
  end
  bodies.each { |b| b.x += 0.001 * b.vx; b.y += 0.001 * b.vy }
  seed = (seed * 1103515245 + step) % 2147483648
end
puts bodies.map { |b| format("%.6f %.6f", b.x, b.y) }.join(" "), seed, (seed**20).digits.sum
