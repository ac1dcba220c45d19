// Virtual calls, multiple and virtual inheritance, dynamic_cast, typeid, member pointers,
// std::function, templates.
//
// Hard for a translator: indirect calls with several targets through words in read-only tables.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <typeinfo>
#include <variant>
#include <vector>

struct Shape {
    virtual ~Shape() = default;
    virtual double area() const = 0;
    virtual int corners() const { return 0; }
};
struct Named {
    virtual ~Named() = default;
    virtual const char *name() const = 0;
};
struct Square : Shape, Named {
    double side;
    explicit Square(double s) : side(s) {}
    double area() const override { return side * side; }
    int corners() const override { return 4; }
    const char *name() const override { return "square"; }
};
struct Circle : Shape {
    double radius;
    explicit Circle(double r) : radius(r) {}
    double area() const override { return 3.0 * radius * radius; }
};
struct Cube final : Square {
    using Square::Square;
    double area() const override { return 6 * Square::area(); }
    const char *name() const override { return "cube"; }
};
struct Root { int value = 1; virtual ~Root() = default; virtual int get() { return value; } };
struct Left : virtual Root { int get() override { return value * 10; } };
struct Right : virtual Root { int extra = 5; };
struct Diamond : Left, Right { int get() override { return Left::get() + extra; } };

struct Accumulator {
    long total = 0;
    void add(long x) { total += x; }
    void twice(long x) { total = total * 2 + x; }
    virtual void mixed(long x) { total ^= x; }
    virtual ~Accumulator() = default;
};

int main(int argc, char **argv) {
    long n = argc > 1 ? atol(argv[1]) : 2000;
    std::vector<std::unique_ptr<Shape>> shapes;
    for (int i = 0; i < 12; i++) {
        if (i % 3 == 0) shapes.push_back(std::make_unique<Square>(i));
        else if (i % 3 == 1) shapes.push_back(std::make_unique<Circle>(i));
        else shapes.push_back(std::make_unique<Cube>(i));
    }
    double total = 0;
    long corners = 0, named = 0, squares = 0;
    for (long i = 0; i < n; i++) {
        const Shape &s = *shapes[(size_t)(i * 5 % 12)];
        total += s.area();
        corners += s.corners();
    }
    for (const auto &s : shapes) {
        if (auto *p = dynamic_cast<const Named *>(s.get())) named += p->name()[0];
        if (dynamic_cast<const Square *>(s.get())) squares++;
        if (typeid(*s) == typeid(Cube)) squares += 100;
    }
    std::printf("%.1f %ld %ld %ld\n", total, corners, named, squares);
    try {
        std::printf("%d\n", dynamic_cast<Square &>(*shapes[1]).corners());
    } catch (const std::bad_cast &) {
        std::printf("bad_cast\n");
    }
    Diamond diamond;
    Root *root = &diamond;
    Right *right = dynamic_cast<Right *>(root);
    right->extra = 9;
    std::printf("%d %d %s\n", root->get(), dynamic_cast<void *>(right) == &diamond, typeid(*root).name());
    Accumulator a;
    void (Accumulator::*methods[])(long) = {&Accumulator::add, &Accumulator::twice, &Accumulator::mixed};
    for (long i = 0; i < n; i++) (a.*methods[i % 3])(i);
    std::printf("%ld\n", a.total);
    std::vector<std::function<long(long)>> functions;
    for (long k = 0; k < 4; k++) functions.push_back([k, &a](long x) { return x * k + (a.total & 7); });
    long x = 1;
    for (long i = 0; i < n / 4; i++) x = functions[(size_t)i & 3](x) % 1000003;
    std::printf("%ld\n", x);
    std::variant<int, double, const char *> v = 1;
    long sum = 0;
    for (long i = 0; i < 100; i++) {
        if (i % 3 == 0) v = (int)i;
        else if (i % 3 == 1) v = i / 2.0;
        else v = "abc";
        sum += std::visit([](auto value) -> long {
            if constexpr (std::is_same_v<decltype(value), const char *>) return value[0];
            else return (long)value;
        }, v);
    }
    std::printf("%ld\n", sum);
    return 0;
}
