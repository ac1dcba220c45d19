//! Code under construction: bytes, labels, and the fields that are filled in later.

use super::{Assembler, encode};
use iced_x86::{Encoder, IcedError, Instruction};
use std::ops::Range;

/// A position in an [`Asm`], which may be bound later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Label(usize);

/// A field of four bytes that is filled in when the code has its address. `T` says which value it
/// gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Relocation<T> {
    /// Offset of the field.
    pub at: u32,
    pub target: T,
}

/// Code under construction.
pub(crate) struct Asm<T> {
    bytes: Vec<u8>,
    /// By label: its offset, once it is bound.
    labels: Vec<Option<usize>>,
    /// Jumps by one byte, which is at this offset, to a label.
    short: Vec<(usize, Label)>,
    /// Jumps by four bytes.
    near: Vec<(usize, Label)>,
    relocations: Vec<Relocation<T>>,
    /// Made at its first use, because its tables take half a millisecond.
    encoder: Option<Encoder>,
}

impl<T> Assembler for Asm<T> {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    #[inline]
    fn here(&self) -> usize {
        self.bytes.len()
    }
}

impl<T> Asm<T> {
    /// An empty buffer.
    pub fn new() -> Asm<T> {
        let (labels, short, near, relocations) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Asm { bytes: Vec::new(), labels, short, near, relocations, encoder: None }
    }

    /// A new label, which must be bound before the code is finished.
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Binds the label to this offset.
    pub fn bind(&mut self, label: Label) {
        self.labels[label.0] = Some(self.bytes.len());
    }

    /// A new label, bound to this offset.
    pub fn bound(&mut self) -> Label {
        let label = self.label();
        self.bind(label);
        label
    }

    /// The offset of a label that is bound.
    pub fn offset(&self, label: Label) -> usize {
        self.labels[label.0].expect("the label is bound")
    }

    /// `jmp label`, of two bytes.
    pub fn jmp_short(&mut self, label: Label) {
        self.jmp_over(0);
        self.short.push((self.bytes.len() - 1, label));
    }

    /// `jmp label`, of five bytes.
    pub fn jmp_near(&mut self, label: Label) {
        self.jmp();
        self.near.push((self.bytes.len() - 4, label));
    }

    /// `jrcxz label`
    pub fn jrcxz(&mut self, label: Label) {
        self.jrcxz_over(0);
        self.short.push((self.bytes.len() - 1, label));
    }

    /// `jcc label`, of six bytes.
    pub fn jcc_to(&mut self, condition: u8, label: Label) {
        self.jcc(condition);
        self.near.push((self.bytes.len() - 4, label));
    }

    /// `jcc label`, of two bytes.
    pub fn jcc_short(&mut self, condition: u8, label: Label) {
        self.put(&[0x70 | condition, 0]);
        self.short.push((self.bytes.len() - 1, label));
    }

    /// Declares the last four bytes a field with this value. Returns its offset.
    pub fn relocate(&mut self, target: T) -> u32 {
        let at = self.bytes.len() as u32 - 4;
        self.relocations.push(Relocation { at, target });
        at
    }

    /// Declares the four bytes at this offset a field with this value.
    pub fn relocate_at(&mut self, at: u32, target: T) {
        self.relocations.push(Relocation { at, target });
    }

    /// The value of the last relocation.
    pub fn last_target(&mut self) -> Option<&mut T> {
        self.relocations.last_mut().map(|relocation| &mut relocation.target)
    }

    /// An instruction from outside, which has no operand relative to its place.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub fn instruction(&mut self, inst: &Instruction) -> Result<(), IcedError> {
        encode(&mut self.encoder, inst, |bytes| self.bytes.extend_from_slice(bytes))
    }

    /// Inserts fewer than ten bytes of no-operations before the code from `from` on. That code must
    /// not depend on its address. A label at `from` itself stays there.
    pub fn pad_before(&mut self, from: usize, bytes: usize) {
        self.nop(bytes);
        self.bytes[from..].rotate_right(bytes);
        self.labels.iter_mut().flatten().filter(|at| **at > from).for_each(|at| *at += bytes);
        self.short
            .iter_mut()
            .chain(&mut self.near)
            .filter(|(at, _)| *at >= from)
            .for_each(|(at, _)| *at += bytes);
        self.relocations
            .iter_mut()
            .filter(|r| r.at as usize >= from)
            .for_each(|r| r.at += bytes as u32);
    }

    /// The code and its relocations; all labels that are jumped to are bound.
    pub fn finish(mut self) -> (Vec<u8>, Vec<Relocation<T>>) {
        self.resolve();
        (self.bytes, self.relocations)
    }

    /// Fills in the jumps to labels.
    fn resolve(&mut self) {
        for (at, label) in std::mem::take(&mut self.short) {
            let distance = i8::try_from(self.offset(label) as isize - at as isize - 1);
            self.bytes[at] = distance.expect("a label of a short jump is near") as u8;
        }
        for (at, label) in std::mem::take(&mut self.near) {
            let distance = (self.offset(label) as isize - at as isize - 4) as i32;
            self.bytes[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
    }
}

impl Asm<u64> {
    /// `jmp address`
    pub fn jmp_to(&mut self, address: u64) {
        self.jmp();
        self.relocate(address);
    }

    /// The code as it is at `base`, and the addresses of its labels. Each relocation is an address;
    /// its field becomes the distance from the field's end.
    pub fn finish_at(mut self, base: u64) -> (Vec<u8>, Placed) {
        self.resolve();
        let Asm { mut bytes, labels, relocations, .. } = self;
        for Relocation { at, target } in relocations {
            let at = at as usize;
            let relative = target.wrapping_sub(base + at as u64 + 4) as u32;
            bytes[at..at + 4].copy_from_slice(&relative.to_le_bytes());
        }
        (bytes, Placed { base, labels })
    }
}

/// The addresses of the labels of placed code.
pub(crate) struct Placed {
    base: u64,
    labels: Vec<Option<usize>>,
}

impl Placed {
    /// The address of a label that was bound.
    pub fn at(&self, label: Label) -> u64 {
        self.base + self.labels[label.0].expect("the label is bound") as u64
    }

    /// The addresses from one label to another.
    pub fn range(&self, from: Label, to: Label) -> Range<u64> {
        self.at(from)..self.at(to)
    }
}
