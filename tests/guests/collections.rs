//! Rust: collections, iterators, traits, strings, integer overflow checks, and panics that are
//! caught.
//!
//! Hard for a translator: unwinding looks up return addresses, so those on the stack must be the
//! guest's.
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::fmt::Write as _;

trait Animal {
    fn legs(&self) -> u32;
    fn name(&self) -> String;
}
struct Dog(u32);
struct Bird;
impl Animal for Dog {
    fn legs(&self) -> u32 {
        4 + self.0
    }
    fn name(&self) -> String {
        format!("dog{}", self.0)
    }
}
impl Animal for Bird {
    fn legs(&self) -> u32 {
        2
    }
    fn name(&self) -> String {
        "bird".into()
    }
}

fn collatz(limit: u64) -> (u64, u32) {
    (1..limit)
        .map(|start| {
            let (mut n, mut steps) = (start, 0);
            while n != 1 {
                n = if n % 2 == 0 { n / 2 } else { 3 * n + 1 };
                steps += 1;
            }
            (start, steps)
        })
        .max_by_key(|&(start, steps)| (steps, start))
        .unwrap()
}

fn shortest(edges: &[(usize, usize, u64)], nodes: usize) -> Vec<u64> {
    let mut distance = vec![u64::MAX; nodes];
    let mut heap = BinaryHeap::new();
    distance[0] = 0;
    heap.push((std::cmp::Reverse(0), 0));
    while let Some((std::cmp::Reverse(d), node)) = heap.pop() {
        if d > distance[node] {
            continue;
        }
        for &(from, to, weight) in edges.iter().filter(|edge| edge.0 == node) {
            debug_assert_eq!(from, node);
            if d + weight < distance[to] {
                distance[to] = d + weight;
                heap.push((std::cmp::Reverse(d + weight), to));
            }
        }
    }
    distance
}

fn main() {
    let n: u64 = std::env::args().nth(1).map_or(300, |a| a.parse().unwrap());
    println!("collatz {:?}", collatz(n));
    let mut map = HashMap::new();
    for i in 0..n {
        *map.entry(i * i % 97).or_insert(0u64) += i;
    }
    let ordered: BTreeMap<_, _> = map.iter().collect();
    println!("squares {:?}", ordered.iter().take(4).collect::<Vec<_>>());
    let animal = |i| -> Box<dyn Animal> {
        if i % 2 == 0 { Box::new(Dog(i)) } else { Box::new(Bird) }
    };
    let animals: Vec<Box<dyn Animal>> = (0..6).map(animal).collect();
    let legs: u32 = animals.iter().map(|a| a.legs()).sum();
    println!("legs {legs} {:?}", animals.iter().map(|a| a.name()).collect::<Vec<_>>());
    let edges: Vec<_> = (0..40usize)
        .flat_map(|i| [(i, (i * 7 + 1) % 40, i as u64 + 3), (i, (i + 1) % 40, 11)])
        .collect();
    println!("distances {:?}", &shortest(&edges, 40)[30..]);
    let mut text = String::new();
    for word in "the quick brown fox jumps".split(' ').rev() {
        write!(text, "{word:>7}|").unwrap();
    }
    println!("{text} {}", text.chars().filter(|c| "aeiou".contains(*c)).count());
    let mut ring: VecDeque<u32> = (0..10).collect();
    ring.rotate_left(3);
    println!("{ring:?} {:?} {:?}", 200u8.checked_add(100), i64::MIN.wrapping_abs());
    println!("{:.6} {:e} {}", (n as f64).sqrt().ln(), 1234.5f32, f64::NAN.max(2.0));
    std::panic::set_hook(Box::new(|info| eprintln!("hook: \
        {}", info.payload().downcast_ref::<&str>().unwrap_or(&"other"))));
    let caught = std::panic::catch_unwind(|| {
        let v: Vec<u32> = Vec::new();
        if v.is_empty() {
            panic!("on purpose");
        }
    });
    println!("caught {}", caught.is_err());
    let bounds = std::panic::catch_unwind(|| [1, 2, 3][std::env::args().count() + 5]);
    println!("bounds {}", bounds.is_err());
    std::process::exit(if caught.is_err() && bounds.is_err() { 17 } else { 1 });
}
