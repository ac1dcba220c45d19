//! Reading guest code: bytes from guest memory, one decoded instruction at a time.
//!
//! *Fetch* is how code bytes are read; whoever owns the address space implements it. A [`Reader`] keeps a small
//! window of fetched bytes, so that decoding a block costs one or two fetches.
//!
//! The decoder follows the vendor of the host: AMD processors honour an operand-size prefix on near branches
//! where Intel's ignore it, which changes even the length of the instruction.

use iced_x86::{Code, Decoder, DecoderError, DecoderOptions, Instruction};
use std::ops::Range;
use std::sync::LazyLock;

/// The longest instruction there is (Intel SDM vol. 2, 2.3.11); longer ones raise #GP.
pub const MAX_LENGTH: usize = 15;

/// How code bytes are read.
pub trait Fetch {
    /// Copies bytes at `addr` into `buf` and returns how many could be read: fewer than asked for only where
    /// the next byte cannot be fetched.
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize;

    /// May the bytes of `range` change without anybody hearing of it: by plain stores?
    fn is_writable(&self, _range: Range<u64>) -> bool {
        false
    }

    /// The word at `address`, which the instruction at `pc` jumps to, if only calls that everybody hears of can change it.
    fn constant(&self, _pc: u64, _address: u64) -> Option<u64> {
        None
    }

    /// The word at `address` as it is now: anything may change it.
    fn word(&self, _address: u64) -> Option<u64> {
        None
    }

    /// This moment: what is fetched from now on was not read before.
    fn moment(&self) -> Moment {
        Moment::default()
    }

    /// Sees to it, where that is possible, that nothing changes the bytes of `range`, which were fetched after `since`, before
    /// everything made from them is dropped.
    fn watch(&self, range: Range<u64>, _since: Moment) -> Watched {
        if self.is_writable(range) { Watched::Impossible } else { Watched::Already }
    }
}

/// A point in the order of what [`Fetch::watch`] has done for anybody.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Moment(pub u64);

/// What [`Fetch::watch`] has found or done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watched {
    /// No store could change the bytes unnoticed since then.
    Already,
    /// From now on none can, or for not so long: what was fetched may be old.
    Now,
    /// Stores may change the bytes at any time.
    Impossible,
}

/// Code bytes held in a slice, as if mapped at `start`: for tests and tools.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a> {
    /// Guest address of the first byte.
    pub start: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl Fetch for Bytes<'_> {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        let offset = usize::try_from(addr.wrapping_sub(self.start)).unwrap_or(usize::MAX);
        let rest = self.bytes.get(offset..).unwrap_or(&[]);
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        n
    }
}

/// What stands at a guest pc.
#[derive(Clone, Copy, Debug)]
pub enum Decoded {
    /// An instruction; `ip()` and `len()` are set.
    Inst(Instruction),
    /// Bytes that are no instruction: #UD. The number of bytes looked at.
    Invalid(usize),
    /// Prefixes and operands run past 15 bytes: #GP.
    TooLong,
    /// The instruction runs into bytes that cannot be fetched. The number of readable bytes before them.
    Unfetchable(usize),
}

/// iced decoder options that match the host's vendor.
pub fn decoder_options() -> u32 {
    static OPTIONS: LazyLock<u32> = LazyLock::new(|| {
        let leaf = std::arch::x86_64::__cpuid(0);
        let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat();
        let amd_like = vendor == b"AuthenticAMD" || vendor == b"HygonGenuine";
        if amd_like { DecoderOptions::AMD } else { DecoderOptions::NONE }
    });
    *OPTIONS
}

const WINDOW: usize = 128;

/// Decodes instructions at increasing addresses.
pub struct Reader<'f> {
    code: &'f dyn Fetch,
    options: u32,
    start: u64,
    len: usize,
    /// The instruction decoded last: where in the window, and how long.
    last: (usize, usize),
    window: [u8; WINDOW],
}

impl<'f> Reader<'f> {
    /// A reader with nothing fetched yet.
    pub fn new(code: &'f dyn Fetch) -> Reader<'f> {
        Reader { code, options: decoder_options(), start: 0, len: 0, last: (0, 0), window: [0; WINDOW] }
    }

    /// The offset in the window of the bytes from `pc` on: at least [`MAX_LENGTH`] unless some cannot be fetched.
    fn offset(&mut self, pc: u64) -> usize {
        let offset = pc.wrapping_sub(self.start);
        if offset.saturating_add(MAX_LENGTH as u64) > self.len as u64 {
            self.start = pc;
            self.len = self.code.fetch(pc, &mut self.window).min(WINDOW);
            return 0;
        }
        offset as usize
    }

    /// The bytes from `pc` on: at least [`MAX_LENGTH`] unless some cannot be fetched.
    pub fn ahead(&mut self, pc: u64) -> &[u8] {
        let offset = self.offset(pc);
        &self.window[offset..self.len]
    }

    /// As [`Fetch::constant`].
    pub fn constant(&self, pc: u64, address: u64) -> Option<u64> {
        self.code.constant(pc, address)
    }

    /// As [`Fetch::word`].
    pub fn word(&self, address: u64) -> Option<u64> {
        self.code.word(address)
    }

    /// As [`Fetch::fetch`].
    pub fn fetch(&self, address: u64, buffer: &mut [u8]) -> usize {
        self.code.fetch(address, buffer)
    }

    /// The bytes of the instruction decoded last.
    pub fn raw(&self) -> &[u8] {
        &self.window[self.last.0..self.last.0 + self.last.1]
    }

    /// The pc behind the instruction decoded last.
    pub fn next_pc(&self) -> u64 {
        self.start.wrapping_add((self.last.0 + self.last.1) as u64)
    }

    /// Where in [`Reader::raw`] the displacement of the instruction decoded last stands; 0 if it has none.
    pub fn displacement_offset(&self) -> usize {
        let mut decoder = Decoder::new(64, self.raw(), self.options);
        let inst = decoder.decode();
        decoder.get_constant_offsets(&inst).displacement_offset()
    }

    /// What stands at `pc`.
    pub fn decode(&mut self, pc: u64) -> Decoded {
        let options = self.options;
        let offset = self.offset(pc);
        let bytes = &self.window[offset..self.len];
        let available = bytes.len();
        let mut decoder = Decoder::with_ip(64, bytes, pc, options);
        let inst = decoder.decode();
        if inst.code() == Code::Pause && bytes[inst.len() - 2] & 0xf1 == 0x41 {
            // `pause` with REX.B is no pause but `xchg eax, r8d`, which iced overlooks.
            self.last = (offset, inst.len());
            return Decoded::Inst(Decoder::with_ip(64, bytes, pc, options | DecoderOptions::NO_PAUSE).decode());
        }
        if !inst.is_invalid() {
            self.last = (offset, inst.len());
            return Decoded::Inst(inst);
        }
        match decoder.last_error() {
            DecoderError::NoMoreBytes => {
                // The bytes that are there may be undefined already, whatever follows.
                let mut padded = [0; MAX_LENGTH];
                padded[..available].copy_from_slice(bytes);
                let undefined = available > 0
                    && (0..=u8::MAX).all(|next| {
                        padded[available] = next;
                        Decoder::with_ip(64, &padded, pc, options).decode().is_invalid()
                    });
                if undefined { Decoded::Invalid(available) } else { Decoded::Unfetchable(available) }
            }
            _ if decoder.position() >= MAX_LENGTH => Decoded::TooLong,
            _ => Decoded::Invalid(decoder.position().max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(bytes: &[u8]) -> Decoded {
        Reader::new(&Bytes { start: 0x1000, bytes }).decode(0x1000)
    }

    #[test]
    fn tells_what_stands_there() {
        assert!(matches!(at(&[0x90]), Decoded::Inst(i) if i.len() == 1 && i.ip() == 0x1000));
        assert!(matches!(at(&[]), Decoded::Unfetchable(0)));
        assert!(matches!(at(&[0x48, 0x8b]), Decoded::Unfetchable(2)));
        assert!(matches!(at(&[0x06, 0x90]), Decoded::Invalid(_)));
        assert!(matches!(at(&[0x66; 20]), Decoded::TooLong));
        // undefined or not does not depend on what cannot be read
        assert!(matches!(at(&[0x06]), Decoded::Invalid(1)));
        assert!(matches!(at(&[0x0f]), Decoded::Unfetchable(1)));
        // lock on an instruction that cannot be locked
        assert!(matches!(at(&[0xf0, 0x89, 0xc8]), Decoded::Invalid(_)));
        assert!(matches!(at(&[0xf3, 0x90]), Decoded::Inst(i) if i.code() == Code::Pause));
        assert!(matches!(at(&[0xf3, 0x41, 0x90]), Decoded::Inst(i) if i.code() == Code::Xchg_r32_EAX));
    }

    #[test]
    fn reads_on_across_the_window() {
        let bytes = [0x90; 1000];
        let code = Bytes { start: 0x40, bytes: &bytes };
        let mut reader = Reader::new(&code);
        for pc in 0x40..0x40 + 1000 {
            assert!(matches!(reader.decode(pc), Decoded::Inst(i) if i.ip() == pc));
        }
        assert!(matches!(reader.decode(0x40 + 1000), Decoded::Unfetchable(0)));
    }
}
