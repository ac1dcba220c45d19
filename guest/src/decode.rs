//! Reading guest code: bytes from guest memory, one decoded instruction at a time.
//!
//! *Data.* [`Fetch`] is how code bytes are read; the owner of the address space implements it (the
//! runtime, or [`Bytes`] in tests). A [`Reader`] keeps a small window of fetched bytes, so that
//! decoding a block costs one or two fetches.
//!
//! *Invariant.* A `Reader` reports exactly what the host's processor would execute. AMD processors
//! honour an operand-size prefix on near branches where Intel's ignore it, which changes even the
//! length of the instruction; the decoder follows the vendor of the host.
//!
//! *Changes of code.* Code that is translated from writable pages must be invalidated when a store
//! changes them. [`Fetch::moment`] is taken before the bytes are read, and [`Fetch::watch`] after
//! it: its answer says whether a store could have changed the bytes between the two.
//!
//! *Example.* `Reader::new(&code).decode(0x1000)` gives `Decoded::Inst(add [rdi+8], eax)`;
//! `next_pc()` is then 0x1003.

use iced_x86::{Code, Decoder, DecoderError, DecoderOptions, Instruction};
use std::ops::Range;
use std::sync::LazyLock;

/// The longest instruction there is (Intel SDM vol. 2, 2.3.11); longer ones raise #GP.
pub const MAX_LENGTH: usize = 15;

/// How code bytes are read.
pub trait Fetch {
    /// Copies bytes at `addr` into `buf` and returns how many could be read: fewer than asked for
    /// only where the next byte cannot be fetched.
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize;

    /// May plain stores change the bytes of `range` without any notification?
    fn is_writable(&self, _range: Range<u64>) -> bool {
        false
    }

    /// The word at `address`, which the instruction at `pc` jumps to, if only system calls (and no
    /// stores) can change it. Such calls invalidate the code that was made from the word.
    fn constant(&self, _pc: u64, _address: u64) -> Option<u64> {
        None
    }

    /// The current value of the word at `address`. Any store may change it later.
    fn word(&self, _address: u64) -> Option<u64> {
        None
    }

    /// The present point in the order of [`Fetch::watch`] calls: bytes that are fetched later were
    /// not read before it.
    fn moment(&self) -> Moment {
        Moment::default()
    }

    /// Write-protects the pages of `range` if that is possible, so that a store to them first
    /// invalidates all code made from them. The bytes were fetched after `since`.
    fn watch(&self, range: Range<u64>, _since: Moment) -> Watched {
        if self.is_writable(range) { Watched::Impossible } else { Watched::Already }
    }
}

/// A point in the order in which [`Fetch::watch`] has protected pages, for all threads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Moment(pub u64);

/// What [`Fetch::watch`] has found or done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watched {
    /// The pages have been protected since before `since`: the fetched bytes are current.
    Already,
    /// The pages are protected now, but were not at some moment after `since`. What was fetched may
    /// be old and must be fetched again.
    Now,
    /// The pages cannot be protected. Stores may change the bytes at any time.
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

/// What was decoded at a guest pc.
#[derive(Clone, Copy, Debug)]
pub enum Decoded {
    /// An instruction; its `ip()` and `len()` are set.
    Inst(Instruction),
    /// Undefined bytes: the processor raises #UD. The number of bytes looked at.
    Invalid(usize),
    /// Prefixes and operands run past 15 bytes: the processor raises #GP.
    TooLong,
    /// The instruction runs into bytes that cannot be fetched. The number of readable bytes before
    /// them.
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

/// AMD's processors without user interrupts ignore the prefix that makes `clui` of `rdpkru` and `stui` of
/// `wrpkru` (tested). Others refuse the prefix, as they refuse these instructions: Linux does not enable them.
fn without_user_interrupts(mut inst: Instruction, options: u32) -> Instruction {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// Bit 5 of edx of leaf 7: user interrupts.
    static HAS: LazyLock<bool> =
        LazyLock::new(|| __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx >> 5 & 1 != 0);
    let other = match inst.code() {
        Code::Clui => Code::Rdpkru,
        Code::Stui => Code::Wrpkru,
        _ => return inst,
    };
    if options & DecoderOptions::AMD != 0 && !*HAS {
        inst.set_code(other);
    }
    inst
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
        Reader {
            code,
            options: decoder_options(),
            start: 0,
            len: 0,
            last: (0, 0),
            window: [0; WINDOW],
        }
    }

    /// The offset in the window of the bytes from `pc` on: at least [`MAX_LENGTH`] unless some
    /// cannot be fetched.
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

    /// The pc after the instruction decoded last.
    pub fn next_pc(&self) -> u64 {
        self.start.wrapping_add((self.last.0 + self.last.1) as u64)
    }

    /// Where in [`Reader::raw`] the displacement of the instruction decoded last stands; 0 if it
    /// has none.
    pub fn displacement_offset(&self) -> usize {
        let mut decoder = Decoder::new(64, self.raw(), self.options);
        let inst = decoder.decode();
        decoder.get_constant_offsets(&inst).displacement_offset()
    }

    /// Decodes the instruction at `pc`.
    pub fn decode(&mut self, pc: u64) -> Decoded {
        let options = self.options;
        let offset = self.offset(pc);
        let bytes = &self.window[offset..self.len];
        let available = bytes.len();
        let mut decoder = Decoder::with_ip(64, bytes, pc, options);
        let inst = decoder.decode();
        if inst.code() == Code::Pause && bytes[inst.len() - 2] & 0xf1 == 0x41 {
            // `pause` with REX.B is `xchg eax, r8d` on some processors, which iced does not know.
            self.last = (offset, inst.len());
            return Decoded::Inst(
                Decoder::with_ip(64, bytes, pc, options | DecoderOptions::NO_PAUSE).decode(),
            );
        }
        if !inst.is_invalid() {
            self.last = (offset, inst.len());
            return Decoded::Inst(without_user_interrupts(inst, options));
        }
        match decoder.last_error() {
            DecoderError::NoMoreBytes => {
                // The readable bytes may already be undefined, whatever bytes follow them.
                let mut padded = [0; MAX_LENGTH];
                padded[..available].copy_from_slice(bytes);
                let undefined = available > 0
                    && (0..=u8::MAX).all(|next| {
                        padded[available] = next;
                        Decoder::with_ip(64, &padded, pc, options).decode().is_invalid()
                    });
                if undefined {
                    Decoded::Invalid(available)
                } else {
                    Decoded::Unfetchable(available)
                }
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
        // Whether an instruction is undefined does not depend on the bytes that cannot be read.
        assert!(matches!(at(&[0x06]), Decoded::Invalid(1)));
        assert!(matches!(at(&[0x0f]), Decoded::Unfetchable(1)));
        // A lock prefix on an instruction that does not allow one.
        assert!(matches!(at(&[0xf0, 0x89, 0xc8]), Decoded::Invalid(_)));
        assert!(matches!(at(&[0xf3, 0x90]), Decoded::Inst(i) if i.code() == Code::Pause));
        assert!(
            matches!(at(&[0xf3, 0x41, 0x90]), Decoded::Inst(i) if i.code() == Code::Xchg_r32_EAX)
        );
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

    #[test]
    fn amd_without_user_interrupts_ignores_their_prefix() {
        let decode = |bytes: &[u8]| {
            let options = DecoderOptions::AMD;
            without_user_interrupts(Decoder::new(64, bytes, options).decode(), options).code()
        };
        let (clui, stui) = (decode(&[0xf3, 0x0f, 0x01, 0xee]), decode(&[0xf3, 0x0f, 0x01, 0xef]));
        let both = [(Code::Clui, Code::Stui), (Code::Rdpkru, Code::Wrpkru)];
        assert!(both.contains(&(clui, stui)), "{clui:?}, {stui:?}");
        assert_eq!(decode(&[0xf3, 0x0f, 0x01, 0xec]), Code::Uiret);
        let stays = without_user_interrupts(Instruction::with(Code::Clui), DecoderOptions::NONE);
        assert_eq!(stays.code(), Code::Clui);
    }
}
