// iostream, string, containers, algorithms, sorting with lambdas, regular expressions, and static
// constructors and destructors.
#include <algorithm>
#include <deque>
#include <iomanip>
#include <iostream>
#include <list>
#include <map>
#include <numeric>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

struct Loud {
    const char *name;
    explicit Loud(const char *n) : name(n) { std::cout << "construct " << name << "\n"; }
    ~Loud() { std::cout << "destroy " << name << std::endl; }
};
static Loud first("first"), second("second");

int main(int argc, char **argv) {
    long n = argc > 1 ? atol(argv[1]) : 200;
    std::map<std::string, int> counts;
    std::unordered_map<long, long> squares;
    std::string word, line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        while (words >> word) counts[word]++;
    }
    for (const auto &[w, c] : counts) std::cout << std::setw(8) << std::left << w << c << '\n';
    for (long i = 0; i < n; i++) squares[i * 7919] = i * i;
    long total = 0;
    for (long i = 0; i < n; i++) total += squares.at(i * 7919);
    std::cout << "total " << total << " hex " << std::hex << std::showbase << total << std::dec << '\n';
    std::vector<std::string> names;
    for (long i = 0; i < n; i++) names.push_back("name" + std::to_string(i * 37 % n));
    std::sort(names.begin(), names.end(), [](const auto &a, const auto &b) {
        return a.size() != b.size() ? a.size() > b.size() : a < b;
    });
    std::cout << names.front() << ' ' << names.back() << ' ' << names[names.size() / 2] << '\n';
    std::deque<int> queue;
    std::list<int> list;
    std::set<int> set;
    for (int i = 0; i < 100; i++) {
        if (i % 2) queue.push_back(i);
        else queue.push_front(i);
        list.push_back(i * 31 % 17);
        set.insert(i * i % 50);
    }
    list.sort();
    list.unique();
    std::cout << queue.front() << ' ' << queue.back() << ' ' << list.size() << ' ' << set.size() << ' '
              << std::accumulate(set.begin(), set.end(), 0) << '\n';
    std::cout << std::fixed << std::setprecision(3) << 3.14159265 << ' ' << std::scientific << 12345.678 << ' '
              << std::setfill('*') << std::setw(10) << std::right << 42 << '\n';
    std::string text = "2024-01-15 and 1999-12-31";
    std::regex date("([0-9]{4})-([0-9]{2})-([0-9]{2})");
    std::cout << std::regex_replace(text, date, "$3.$2.$1") << '\n';
    std::vector<int> permutation{1, 2, 3, 4};
    int even = 0;
    do even += permutation[0] < permutation[3];
    while (std::next_permutation(permutation.begin(), permutation.end()));
    std::cout << even << '\n';
    std::cerr << "to the error stream\n";
    return 3;
}
