//! Entry states in the text form: what `dynasour ir eval` and the tests start a program with.
//!
//! ```text
//! state "two elements" {
//!   rdi = 0x10000
//!   rflags = 0x44
//!   memory 0x10000: i64 3, 4
//!   memory 0x20000: zero 4096
//!   read_only 0x10000
//!   shared 0x20000
//!   answer 0x20008 after 100
//!   native 0x401000 result 0 = 7
//!   input 1, 2, 3
//! }
//! ```
//!
//! Registers and flags that are not named are 0. Memory that is not named cannot be accessed;
//! naming one byte makes its page accessible.
//!
//! [`Setup`] is plain data that the parser makes; [`Setup::build`] makes a state and a machine of
//! it. A later setting overrides an earlier one. No lock.

use crate::eval::{Machine, ModelMachine, State};
use crate::types::{Loc, Operand, Ty};
use std::fmt;

/// Most bytes that one `zero` may ask for (guess: a short text must not ask for much memory).
pub const MAX_ZERO: u64 = 1 << 22;

/// One line of a `state`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Setting {
    /// `rdi = 0x10000`
    Loc(Loc, u64),
    /// `memory ADDRESS: TYPE VALUE, …`
    Data {
        /// Address of the first byte.
        address: u64,
        /// An integer type.
        ty: Ty,
        /// The values, little endian, one after the other.
        values: Vec<u64>,
    },
    /// `memory ADDRESS: zero SIZE`, at most [`MAX_ZERO`] bytes
    Zero {
        /// Of the first byte.
        address: u64,
        /// In bytes.
        size: u64,
    },
    /// `read_only ADDRESS`: the page there
    ReadOnly(u64),
    /// `shared ADDRESS`: a peer writes to the page there too ([`ModelMachine::share`])
    Shared(u64),
    /// `answer ADDRESS after LOADS`: a peer sets the byte there after that many loads of it
    /// ([`ModelMachine::answer`])
    Answer {
        /// Of the byte.
        address: u64,
        /// Loads of it by the program.
        after: u32,
    },
    /// `native PC result N = VALUE`: what the native instruction there computes
    /// ([`ModelMachine::choose`])
    Native {
        /// Its pc.
        ip: u64,
        /// The position among its results.
        output: usize,
        /// The result.
        value: u64,
    },
    /// `input VALUE, …`
    Input(Vec<u64>),
}

/// A `state`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Setup {
    /// What the text calls it.
    pub name: Option<String>,
    /// In order; later ones win.
    pub settings: Vec<Setting>,
}

impl Setting {
    fn apply(&self, state: &mut State, machine: &mut ModelMachine) {
        match self {
            Setting::Loc(loc, value) => match loc.ssa_index() {
                Some(_) => state.set(*loc, *value),
                None => machine.put(*loc, *value),
            },
            Setting::Data { address, ty, values } => {
                let bytes = values
                    .iter()
                    .flat_map(|v| v.to_le_bytes().into_iter().take(ty.bytes() as usize));
                machine.write(*address, &bytes.collect::<Vec<u8>>());
            }
            Setting::Zero { address, size } => machine.map(*address, *size),
            Setting::ReadOnly(address) => machine.protect(*address),
            Setting::Shared(address) => machine.share(*address),
            Setting::Answer { address, after } => machine.answer(*address, *after),
            Setting::Native { ip, output, value } => machine.choose(*ip, *output, *value),
            Setting::Input(values) => machine.input.extend(values),
        }
    }
}

impl Setup {
    /// The state and the machine that this describes.
    pub fn build(&self) -> (State, ModelMachine) {
        let (mut state, mut machine) = (State::default(), ModelMachine::new());
        self.settings.iter().for_each(|s| s.apply(&mut state, &mut machine));
        (state, machine)
    }
}

fn list(f: &mut fmt::Formatter<'_>, values: &[u64]) -> fmt::Result {
    values.iter().enumerate().try_for_each(|(i, value)| {
        write!(f, "{}{}", if i > 0 { ", " } else { "" }, Operand::Const(*value))
    })
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Loc(loc, value) => write!(f, "{loc} = {}", Operand::Const(*value)),
            Setting::Data { address, ty, values } => {
                write!(f, "memory {address:#x}: {ty} ")?;
                list(f, values)
            }
            Setting::Zero { address, size } => write!(f, "memory {address:#x}: zero {size}"),
            Setting::ReadOnly(address) => write!(f, "read_only {address:#x}"),
            Setting::Shared(address) => write!(f, "shared {address:#x}"),
            Setting::Answer { address, after } => write!(f, "answer {address:#x} after {after}"),
            Setting::Native { ip, output, value } => {
                write!(f, "native {ip:#x} result {output} = {}", Operand::Const(*value))
            }
            Setting::Input(values) => {
                f.write_str("input ")?;
                list(f, values)
            }
        }
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("state ")?;
        if let Some(name) = &self.name {
            write!(f, "\"{name}\" ")?;
        }
        f.write_str("{\n")?;
        self.settings.iter().try_for_each(|setting| writeln!(f, "  {setting}"))?;
        f.write_str("}\n")
    }
}

/// What states say of memory that is read-only: address, bytes and value of each word.
pub fn read_only_words(setups: &[Setup]) -> Vec<(u64, u32, u64)> {
    let mut words = Vec::new();
    for setup in setups {
        let pages: Vec<u64> = setup
            .settings
            .iter()
            .filter_map(|setting| match setting {
                Setting::ReadOnly(address) => Some(address >> 12),
                _ => None,
            })
            .collect();
        for setting in &setup.settings {
            let Setting::Data { address, ty, values } = setting else { continue };
            for (i, value) in values.iter().enumerate() {
                let bytes = ty.bytes();
                let at = address.wrapping_add(i as u64 * u64::from(bytes));
                let end = at.wrapping_add(u64::from(bytes) - 1);
                if pages.contains(&(at >> 12)) && pages.contains(&(end >> 12)) {
                    words.push((at, bytes, *value));
                }
            }
        }
    }
    words
}
