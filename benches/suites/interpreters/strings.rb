# Lines of a text: split, gsub with a block, tr, scan, symbols, <<.
counts, sum = Hash.new(0), 0
File.foreach(ARGV[0], chomp: true) do |line|
  words = line.split
  words.each { |word| counts[word.length > 3 ? word[0, 3].to_sym : :short] += 1 }
  title = line.gsub(/\b[a-m](\w*)/) { "<#{$1.capitalize}>" }.tr("<>", "[]")
  title << words.map(&:reverse).join("_") << line.scan(/[aeiou]+/).size.to_s
  sum = (sum * 31 + title.each_char.count { |c| c == "_" } + title.sum + title.length) % 1000003
end
puts sum, counts.sort.first(6).inspect, counts.sum { |key, count| key.length * count }
