# A mixin, dispatch over two classes, blocks in a recursion, a lambda, Ackermann's function.
module Scored
  def score(by: 1) = value * by % 1009
end
Leaf = Struct.new(:value) do
  include Scored
  def each = yield(self)
end
Pair = Struct.new(:left, :right) do
  include Scored
  def value = left.value + right.value
  def each(&block) = (left.each(&block); right.each(&block))
end
def tree(depth, at) = depth == 0 ? Leaf.new(at) : Pair.new(tree(depth - 1, 2 * at), Leaf.new(at))
def ackermann(m, n) = m == 0 ? n + 1 : ackermann(m - 1, n == 0 ? 1 : ackermann(m, n - 1))

add = ->(a, b) { (a + b) % 1000003 }
sum = (1..ARGV[0].to_i).reduce(0) do |total, i|
  tree(i % 12, i).each { |leaf| total = add.(total, leaf.score(by: i)) }
  add.call(total, ackermann(2, i % 8) + tree(3, i).score)
end
puts sum
