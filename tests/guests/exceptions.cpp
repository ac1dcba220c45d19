// C++ exceptions: types, rethrow, nested, through destructors and noexcept functions,
// exception_ptr, terminate handlers.
//
// Hard for a translator: the unwinder looks up return addresses, so those on the stack must be the
// guest's, and it returns to none of them.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

static long destroyed;
struct Guard {
    int id;
    explicit Guard(int i) : id(i) {}
    ~Guard() { destroyed = destroyed * 7 % 1000003 + id; }
};
struct Base {
    virtual ~Base() = default;
    virtual const char *name() const { return "Base"; }
};
struct Derived : Base {
    const char *name() const override { return "Derived"; }
};

__attribute__((noinline)) static int dive(int depth, int kind) {
    Guard guard(depth);
    if (depth > 0) return dive(depth - 1, kind) + 1;
    switch (kind % 6) {
        case 0: throw kind;
        case 1: throw std::runtime_error("runtime " + std::to_string(kind));
        case 2: throw Derived();
        case 3: throw "text";
        case 4: throw std::vector<int>(5, kind);
        default: return kind;
    }
}

__attribute__((noinline)) static std::string attempt(int depth, int kind) {
    try {
        try {
            return "value " + std::to_string(dive(depth, kind));
        } catch (const std::exception &) {
            Guard guard(1000);
            throw;
        } catch (int i) {
            throw std::out_of_range("was " + std::to_string(i));
        }
    } catch (const std::out_of_range &e) {
        return std::string("out_of_range ") + e.what();
    } catch (const std::runtime_error &e) {
        return std::string("runtime_error ") + e.what();
    } catch (const Base &b) {
        return b.name();
    } catch (const std::vector<int> &v) {
        return "vector " + std::to_string(v.size() * (size_t)v[0]);
    } catch (...) {
        return "something";
    }
}

int main(int argc, char **argv) {
    long n = argc > 1 ? atol(argv[1]) : 60;
    for (int kind = 0; kind < 6; kind++) std::printf("%s\n", attempt(kind, kind).c_str());
    size_t length = 0;
    for (long i = 0; i < n; i++) length += attempt((int)(i % 10), (int)i).size();
    std::printf("length %zu, destroyed %ld\n", length, destroyed);
    std::exception_ptr kept;
    try {
        std::vector<int>().at(3);
    } catch (...) {
        kept = std::current_exception();
    }
    try {
        std::rethrow_exception(kept);
    } catch (const std::out_of_range &) {
        std::printf("kept and rethrown\n");
    }
    try {
        (void)std::stoi("not a number");
    } catch (const std::invalid_argument &e) {
        std::printf("%s\n", e.what());
    }
    try {
        try {
            throw std::logic_error("inner");
        } catch (...) {
            std::throw_with_nested(std::runtime_error("outer"));
        }
    } catch (const std::exception &e) {
        try {
            std::rethrow_if_nested(e);
        } catch (const std::exception &inner) {
            std::printf("%s of %s\n", inner.what(), e.what());
        }
    }
    try {
        char *p = new char[(size_t)1 << 62];
        std::printf("%p\n", (void *)p);
    } catch (const std::bad_alloc &) {
        std::printf("bad_alloc\n");
    }
    std::set_terminate([] {
        std::printf("terminate\n");
        std::fflush(stdout);
        std::_Exit(33);
    });
    []() noexcept { throw 1; }();
    return 0;
}
