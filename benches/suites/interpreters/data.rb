# Arrays of hashes: grouping, sorting, slices, sets, transposition.
require "set"
sum = 0
1.upto(ARGV[0].to_i) do |round|
  rows = (1..2000).map { |i| { id: i, team: i * round % 17, points: i * (7919 + round) % 1009 } }
  teams = rows.group_by { |row| row[:team] }.transform_values { |t| t.sum { |row| row[:points] } }
  best = rows.sort_by { |row| [-row[:points], row[:id]] }.each_slice(50).map(&:first)
  odd = Set.new(rows.map { |row| row[:points] }.select(&:odd?))
  grid = best.map { |row| Array.new(20) { |i| row[:points] + i } }.transpose.flatten.uniq
  places = grid.each_with_index.to_h.select { |value, _| odd.include?(value) }
  sum = (sum * 7 + teams.values.max + places.values.sum + odd.size + best.last[:id]) % 1000003
end
puts sum
