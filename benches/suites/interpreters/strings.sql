-- Text functions, LIKE and GLOB, aggregates of text.
CREATE TABLE lines(id INTEGER PRIMARY KEY, body TEXT);
WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < :n)
INSERT INTO lines
SELECT i, printf('%05d-%s-%x', i * 7919 % 100003, hex(i * 31), i) || ' the quick fox' FROM c;
SELECT sum(length(replace(body, 'c', '--'))), sum(instr(body, '-3')), max(upper(substr(body, 4, 9)))
FROM lines WHERE body LIKE '%3_-%5%fox';
SELECT substr(body, 3, 3) AS part, count(*), min(trim(body, '0123')), max(lower(hex(body)))
FROM lines WHERE body GLOB '*[1-4][a-f] *' GROUP BY part ORDER BY 2 DESC, part LIMIT 5;
SELECT length(group_concat(body || quote(id))), count(DISTINCT substr(body, -16, 2)) FROM lines;
