-- A sieve, a sort of records by a comparison function, grouping by a string, a linked list.
local size, sum = 20000, 0
for round = 1, tonumber(arg[1]) do
  local composite, primes = {}, {}
  for i = 2, size do
    if not composite[i] then
      primes[#primes + 1] = i
      for j = i * i, size, i do composite[j] = true end
    end
  end
  local people, groups, list = {}, {}, nil
  for i = 1, size do people[i] = { key = i * (7919 + round) % 10007, name = "p" .. i % 97 } end
  table.sort(people, function(a, b) return a.key < b.key end)
  for i, person in ipairs(people) do
    groups[person.name] = (groups[person.name] or 0) + person.key
    if i % 3 == 0 then list = { value = person.key, next = list } end
  end
  while list do sum, list = (sum * 3 + list.value) % 1000003, list.next end
  sum = (sum + groups.p5 + primes[#primes] + table.remove(primes, 10)) % 1000003
end
print(sum)
