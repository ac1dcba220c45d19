// Virtual calls, containers and strings of the C++ library, and exceptions now and then.
extern "C" {
#include "kernel.h"
}
#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct Account {
    explicit Account(uint64_t owner) : owner(owner) {}
    virtual ~Account() = default;
    virtual void pay(uint64_t amount) { balance += amount; }
    virtual uint64_t interest() const { return balance / 64; }
    uint64_t owner, balance = 0;
};

struct Savings : Account {
    using Account::Account;
    uint64_t interest() const override { return balance / 16 + owner % 3; }
};

struct Limited : Account {
    using Account::Account;
    void pay(uint64_t amount) override {
        if (balance + amount > 1000000) throw std::overflow_error("limit");
        Account::pay(amount);
    }
};

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 300);
    uint32_t random = 12345;
    uint64_t sum = 0;
    std::vector<std::unique_ptr<Account>> accounts;
    for (uint64_t i = 0; i < 600; i++) {
        if (i % 3 == 0) accounts.push_back(std::make_unique<Account>(i));
        else if (i % 3 == 1) accounts.push_back(std::make_unique<Savings>(i));
        else accounts.push_back(std::make_unique<Limited>(i));
    }
    for (long round = 0; round < n; round++) {
        uint64_t refused = 0;
        for (int i = 0; i < 4000; i++) {
            auto &account = *accounts[next_random(&random) % accounts.size()];
            try {
                account.pay(next_random(&random) % 5000);
            } catch (const std::overflow_error &) {
                account.balance /= 4;
                refused++;
            }
        }
        uint64_t interest = 0;
        for (const auto &account : accounts) interest += account->interest();
        std::map<std::string, uint64_t> totals;
        for (size_t i = 0; i < 200; i++) {
            std::string key = "k";
            key += std::to_string(accounts[i]->balance % 40);
            totals[key] += accounts[i]->balance;
        }
        std::sort(accounts.begin(), accounts.end(), [](const auto &a, const auto &b) {
            return a->balance != b->balance ? a->balance < b->balance : a->owner < b->owner;
        });
        sum = mix(sum, interest + refused);
        for (const auto &[key, value] : totals) sum = mix(sum, value + key.size());
    }
    return report("objects", n, sum);
}
