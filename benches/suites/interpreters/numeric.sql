-- Integers and floats in a recursive query.
WITH RECURSIVE c(i, x, y) AS (
    SELECT 1, 12345, 0.5
    UNION ALL
    SELECT i + 1, (x * 16807 + i) % 2147483647,
           CASE WHEN y > 1.0 THEN y / 3.0 ELSE y * 1.7 + (x & 255) / 512.0 END
    FROM c WHERE i < :n)
SELECT count(*), sum(x % 1009), max(x >> 3 | i), printf('%.6f', avg(y)), sum(abs(x - i) % 7 = 3)
FROM c WHERE x % 5 <> 2 AND round(y, 2) > 0.1;
