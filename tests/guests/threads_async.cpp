// Threads as C++ has them: std::thread, std::async, futures with exceptions, condition variables,
// thread_local objects with destructors, call_once, shared pointers counted by many threads.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

static std::atomic<int> made{0}, destroyed{0};

struct Counted {
    std::string text;
    Counted() : text("thread local object with a long enough text") { ++made; }
    ~Counted() { destroyed += text.size() > 10; }
};
static thread_local Counted counted;

template <class T> class Channel {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<T> values;
    bool closed = false;

public:
    void send(T value) {
        {
            std::lock_guard<std::mutex> guard(mutex);
            values.push_back(std::move(value));
        }
        changed.notify_one();
    }
    void close() {
        {
            std::lock_guard<std::mutex> guard(mutex);
            closed = true;
        }
        changed.notify_all();
    }
    bool receive(T &value) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return closed || !values.empty(); });
        if (values.empty()) return false;
        value = std::move(values.front());
        values.pop_front();
        return true;
    }
};

static long parallel_sum(const std::vector<long> &values, size_t from, size_t to) {
    if (to - from < 500) return std::accumulate(values.begin() + from, values.begin() + to, 0L);
    size_t middle = from + (to - from) / 2;
    auto left = std::async(std::launch::async, parallel_sum, std::cref(values), from, middle);
    long right = parallel_sum(values, middle, to);
    return left.get() + right;
}

int main() {
    alarm(120);
    std::vector<long> values(4000);
    std::iota(values.begin(), values.end(), 1);
    std::cout << "sum " << parallel_sum(values, 0, values.size()) << "\n";

    Channel<std::string> channel;
    std::mutex results_mutex;
    std::map<std::string, int> results;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([&] {
            std::string word;
            while (channel.receive(word)) {
                counted.text += word;
                std::lock_guard<std::mutex> guard(results_mutex);
                ++results[word];
            }
        });
    for (int i = 0; i < 2000; i++) channel.send("word" + std::to_string(i % 7));
    channel.close();
    for (auto &thread : threads) thread.join();
    for (auto &[word, count] : results) std::cout << word << " " << count << "\n";

    auto failing = std::async(std::launch::async, []() -> int { throw std::runtime_error("thrown in a thread"); });
    try {
        failing.get();
    } catch (const std::exception &error) {
        std::cout << error.what() << "\n";
    }

    auto shared = std::make_shared<std::vector<int>>(1000, 1);
    std::atomic<long> total{0};
    std::once_flag flag;
    int onces = 0;
    threads.clear();
    for (int i = 0; i < 6; i++)
        threads.emplace_back([&, shared] {
            std::call_once(flag, [&] { ++onces; });
            for (int round = 0; round < 300; round++) {
                auto copy = shared;
                total += (*copy)[round];
            }
        });
    for (auto &thread : threads) thread.join();
    std::cout << "total " << total << " uses " << shared.use_count() - 0 << " onces " << onces << "\n";
    std::cout << "balanced " << (made == destroyed) << "\n";
    return 0;
}
