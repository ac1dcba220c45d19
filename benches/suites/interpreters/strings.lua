-- Builds lines of words; replaces, searches and formats.
local words = { "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta" }
local length, sum = 0, 0
for i = 1, tonumber(arg[1]) do
  local parts = {}
  for j = 1, 12 do parts[j] = words[(i * j + j) % #words + 1] .. i % (j + 3) end
  local line = table.concat(parts, " ")
  local swapped = line:gsub("(%w+) (%w+)", "%2 %1"):upper()
  for word, number in swapped:gmatch("(%u+TA)(%d+)") do length = length + #word * number end
  local at = swapped:find("GAMMA", 1, true) or 1
  local text = string.format("%5.2f|%-9s|%d", i / 7, parts[3], swapped:byte(at + i % 5))
  sum = (sum * 31 + #text + text:byte(-1)) % 1000003
end
print(length, sum)
