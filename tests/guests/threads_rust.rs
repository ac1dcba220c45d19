//! Threads as Rust has them: scoped threads, channels, locks, parking, thread-local destructors,
//! panics that end one thread.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, RwLock, mpsc};
use std::thread;

static DROPPED: AtomicU64 = AtomicU64::new(0);

struct Noisy(Cell<u64>);

impl Drop for Noisy {
    fn drop(&mut self) {
        DROPPED.fetch_add(self.0.get(), Ordering::SeqCst);
    }
}

thread_local! {
    static LOCAL: Noisy = const { Noisy(Cell::new(1)) };
}

fn main() {
    let (sender, receiver) = mpsc::channel::<(u32, String)>();
    let workers: Vec<_> = (0..4)
        .map(|number| {
            let sender = sender.clone();
            thread::spawn(move || {
                for i in 0..200u32 {
                    LOCAL.with(|local| local.0.set(local.0.get() + 1));
                    sender.send((number, format!("{}", i * i))).unwrap();
                }
            })
        })
        .collect();
    drop(sender);
    let mut sums = BTreeMap::new();
    for (number, text) in receiver {
        *sums.entry(number).or_insert(0u64) += text.parse::<u64>().unwrap();
    }
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    println!("{sums:?}, dropped {}", DROPPED.load(Ordering::SeqCst));

    let mut values = vec![0u64; 1000];
    thread::scope(|scope| {
        for (i, part) in values.chunks_mut(100).enumerate() {
            scope.spawn(move || part.iter_mut().for_each(|value| *value += i as u64));
        }
    });
    println!("{}", values.iter().sum::<u64>());

    let (text, barrier) = (RwLock::new(String::new()), Barrier::new(3));
    let state = Arc::new((Mutex::new(0u32), Condvar::new(), text, barrier));
    let threads: Vec<_> = (0..3u32)
        .map(|own| {
            let state = state.clone();
            thread::spawn(move || {
                let (turn, changed, text, barrier) = &*state;
                for round in 0..30 {
                    let mut turn = turn.lock().unwrap();
                    while *turn % 3 != own {
                        turn = changed.wait(turn).unwrap();
                    }
                    *turn += 1;
                    if round == 0 {
                        text.write().unwrap().push_str(&format!("{own};"));
                    }
                    changed.notify_all();
                }
                barrier.wait();
                text.read().unwrap().len()
            })
        })
        .collect();
    let lengths: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    println!("{lengths:?} {}", state.2.read().unwrap());

    let parked = thread::spawn(|| {
        thread::park();
        7
    });
    parked.thread().unpark();
    println!("{}", parked.join().unwrap());

    std::panic::set_hook(Box::new(|_| {}));
    let failed = thread::spawn(|| panic!("{}", "in a thread")).join().unwrap_err();
    println!("{:?}", failed.downcast_ref::<String>());
}
