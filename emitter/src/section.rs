//! A run of code under construction.

use iced_x86::{Encoder, IcedError, Instruction};

/// A rel32 field that can be patched lies within so many aligned bytes.
pub(crate) const FIELD: usize = 8;

/// Bytes under construction.
pub(crate) struct Section {
    encoder: Encoder,
    pub len: usize,
    /// Offsets of rel8 fields and their values.
    pub short_jumps: Vec<(usize, u8)>,
}

impl Section {
    pub fn new() -> Section {
        Section { encoder: Encoder::new(64), len: 0, short_jumps: Vec::new() }
    }

    pub fn put(&mut self, inst: &Instruction) -> Result<(), IcedError> {
        self.len += self.encoder.encode(inst, 0)?;
        Ok(())
    }

    pub fn finish(mut self) -> Vec<u8> {
        let mut bytes = self.encoder.take_buffer();
        self.short_jumps.iter().for_each(|(at, value)| bytes[*at] = *value);
        bytes
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.encoder.write_u8(*b));
        self.len += bytes.len();
    }

    /// Pads such that a rel32 field `lead` bytes from here lies within eight aligned bytes.
    pub fn align_field(&mut self, lead: usize) {
        let at = (self.len + lead) % FIELD;
        if at > FIELD - 4 {
            self.pad(FIELD - at);
        }
    }

    /// Puts fewer than ten bytes of no-operations before what starts at `at`, which is not relative to where it is.
    pub fn pad_before(&mut self, at: usize, missing: usize) {
        self.pad(missing);
        let mut bytes = self.encoder.take_buffer();
        bytes[at..].rotate_right(missing);
        self.encoder.set_buffer(bytes);
    }

    /// No-operations, as few as possible (Intel SDM, NOP).
    pub fn pad(&mut self, mut missing: usize) {
        const NOPS: [&[u8]; 10] = [
            &[],
            &[0x90],
            &[0x66, 0x90],
            &[0x0f, 0x1f, 0x00],
            &[0x0f, 0x1f, 0x40, 0x00],
            &[0x0f, 0x1f, 0x44, 0x00, 0x00],
            &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
            &[0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00],
            &[0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
            &[0x66, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
        ];
        while missing > 0 {
            let n = missing.min(9);
            self.bytes(NOPS[n]);
            missing -= n;
        }
    }
}
