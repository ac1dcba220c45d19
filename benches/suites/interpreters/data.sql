-- Two tables with indexes: a join, a window, deletes and updates with subqueries.
CREATE TABLE person(id INTEGER PRIMARY KEY, city INTEGER, age INTEGER, name TEXT);
CREATE TABLE sale(id INTEGER PRIMARY KEY, person INTEGER REFERENCES person, amount INTEGER);
WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < :n)
INSERT INTO person SELECT i, i * 7919 % 101, i % 90, 'n' || i * 104729 % 100003 FROM c;
INSERT INTO sale SELECT id * 2, id * 31 % :n + 1, id % 1009 FROM person;
CREATE INDEX person_city ON person(city, age);
CREATE INDEX sale_person ON sale(person);
SELECT p.city, count(*), sum(s.amount) FROM person p JOIN sale s ON s.person = p.id
WHERE p.age BETWEEN 20 AND 60 GROUP BY p.city HAVING count(*) > 5 ORDER BY 3 DESC, 1 LIMIT 5;
SELECT sum(place * age) FROM
    (SELECT age, rank() OVER (PARTITION BY city ORDER BY age DESC, name) AS place FROM person);
DELETE FROM person WHERE age = 13
    AND NOT EXISTS (SELECT 1 FROM sale WHERE person = person.id AND amount > 500);
UPDATE sale SET amount = amount + coalesce((SELECT age FROM person WHERE id = sale.person), 1)
WHERE id % 3 = 0;
SELECT count(*), sum(amount) FROM sale WHERE person IN (SELECT id FROM person WHERE city < 50);
