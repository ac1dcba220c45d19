//! A small seeded generator (splitmix64), and values at which arithmetic has edge cases.

/// splitmix64.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True in `percent` of 100.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A value at which arithmetic has an edge case, or any value.
    pub fn interesting(&mut self) -> u64 {
        let r = self.next();
        match r % 12 {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => i64::MAX as u64,
            4 => i64::MIN as u64,
            5 => 1 << (r >> 32 & 63),
            6 => (1 << (r >> 32 & 63)) - 1,
            7 => i64::from((r >> 32) as i32) as u64,
            8 => (r >> 32) & 0xff,
            9 => [0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff]
                [(r >> 32) as usize % 9],
            _ => self.next(),
        }
    }
}

/// A number from the environment variable `name`.
pub fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => {
            let parsed = match text.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16),
                None => text.parse(),
            };
            parsed.unwrap_or_else(|e| panic!("{name}={text}: {e}"))
        }
        Err(_) => default,
    }
}
