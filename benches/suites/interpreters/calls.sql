-- Triggers: one posts each entry to an account and a log, the other passes balances to parents by
-- recursion.
CREATE TABLE account(id INTEGER PRIMARY KEY, parent INTEGER, balance INTEGER DEFAULT 0);
CREATE TABLE entry(account INTEGER, amount INTEGER);
CREATE TABLE log(id INTEGER PRIMARY KEY, text TEXT);
CREATE TRIGGER posted AFTER INSERT ON entry BEGIN
    UPDATE account SET balance = balance + new.amount WHERE id = new.account;
    INSERT INTO log(text) SELECT new.account || ':' || balance FROM account
        WHERE id = new.account AND balance % 3 = 0;
END;
CREATE TRIGGER passed AFTER UPDATE OF balance ON account WHEN new.parent > 0 BEGIN
    UPDATE account SET balance = (balance + new.balance) % 1000003 WHERE id = new.parent;
END;
PRAGMA recursive_triggers = on;
WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 500)
INSERT INTO account(id, parent) SELECT i, i / 2 FROM c;
WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < :n)
INSERT INTO entry SELECT i * 7919 % 500 + 1, i * 31 % 1009 FROM c;
SELECT sum(balance), max(balance) FROM account;
SELECT count(*), max(text), sum(length(text)) FROM log;
