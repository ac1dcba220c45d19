//! The guest's alternate signal stack: emulates `sigaltstack(2)`, because the kernel has the host's
//! alternate stack.
//!
//! Data: each guest thread owns one [`AltStack`]. Only that thread uses it, outside the signal
//! handler, so there is no lock. Results and errors are those of the kernel.
//!
//! Example: a guest on its normal stack sets a stack of 0x4000 bytes at 0x10000. The frame of a
//! handler with `SA_ONSTACK` begins below 0x14000 ([`AltStack::entry`]).

/// Flag: the thread runs on the stack.
const SS_ONSTACK: u32 = 1;
/// Flag: the thread has no alternate stack.
const SS_DISABLE: u32 = 2;
/// Flag: the stack is disabled while a handler runs on it.
const SS_AUTODISARM: u32 = 1 << 31;
/// Bytes of the smallest stack that the call accepts (kernel: `MINSIGSTKSZ` of x86).
const MINSIGSTKSZ: u64 = 2048;

/// `stack_t` in the kernel's layout.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StackT {
    /// Lowest address.
    pub sp: u64,
    /// `SS_*`
    pub flags: u32,
    /// Padding.
    pub pad: u32,
    /// Bytes.
    pub size: u64,
}

impl StackT {
    /// Reads the structure from guest memory.
    pub fn from_bytes(bytes: &[u8; 24]) -> StackT {
        let word =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        StackT { sp: word(0), flags: word(8) as u32, pad: 0, size: word(16) }
    }

    /// The structure as it stands in guest memory.
    pub fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[0..8].copy_from_slice(&self.sp.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.flags.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }
}

/// The alternate stack of a guest thread.
#[derive(Clone, Copy, Debug)]
pub struct AltStack {
    sp: u64,
    size: u64,
    flags: u32,
}

/// No stack, as in a new thread.
impl Default for AltStack {
    fn default() -> AltStack {
        AltStack { sp: 0, size: 0, flags: SS_DISABLE }
    }
}

impl AltStack {
    /// No stack, as in a new process. There `uc_stack` of frames does not have `SS_DISABLE`.
    pub fn of_new_process() -> AltStack {
        AltStack { flags: 0, ..AltStack::default() }
    }

    /// Whether `sp` is on the stack. The flags do not matter.
    pub fn contains(&self, sp: u64) -> bool {
        sp > self.sp && sp - self.sp <= self.size
    }

    /// Whether a thread with this `sp` counts as running on the stack, so that a handler continues
    /// there and the stack cannot be changed. Never with `SS_AUTODISARM`.
    pub fn is_in_use(&self, sp: u64) -> bool {
        self.flags & SS_AUTODISARM == 0 && self.contains(sp)
    }

    /// The top of the stack, if a handler with `SA_ONSTACK` has to switch to it from `sp`.
    pub fn entry(&self, sp: u64) -> Option<u64> {
        (self.size != 0 && !self.is_in_use(sp)).then(|| self.sp.wrapping_add(self.size))
    }

    /// The stack as a signal frame has it (`uc_stack`).
    pub fn in_frame(&self) -> StackT {
        StackT { sp: self.sp, flags: self.flags, pad: 0, size: self.size }
    }

    /// Called when the guest's handler starts: disables a stack with `SS_AUTODISARM`.
    pub fn on_delivery(&mut self) {
        if self.flags & SS_AUTODISARM != 0 {
            *self = AltStack::default();
        }
    }

    /// The old stack that the system call reports.
    pub fn query(&self, sp: u64) -> StackT {
        let state = match self.size {
            0 => SS_DISABLE,
            _ if self.is_in_use(sp) => SS_ONSTACK,
            _ => 0,
        };
        StackT { sp: self.sp, flags: state | self.flags & SS_AUTODISARM, pad: 0, size: self.size }
    }

    /// Sets a new stack, for a thread whose stack pointer is `sp`. The error is an errno.
    pub fn set(&mut self, new: StackT, sp: u64) -> Result<(), i32> {
        if self.is_in_use(sp) {
            return Err(libc::EPERM);
        }
        let mode = new.flags & !SS_AUTODISARM;
        match mode {
            SS_DISABLE => *self = AltStack { sp: 0, size: 0, flags: new.flags },
            SS_ONSTACK | 0 => {
                let changed = (new.sp, new.size, new.flags) != (self.sp, self.size, self.flags);
                if changed && new.size < MINSIGSTKSZ {
                    return Err(libc::ENOMEM);
                }
                *self = AltStack { sp: new.sp, size: new.size, flags: new.flags };
            }
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(flags: u32, size: u64) -> StackT {
        StackT { sp: 0x10000, flags, pad: 0, size }
    }

    #[test]
    fn set_query_disable() {
        let mut alt = AltStack::default();
        assert_eq!(alt.query(0).flags, SS_DISABLE);
        assert_eq!(alt.entry(0x500), None);
        assert_eq!(alt.set(stack(0, 100), 0), Err(libc::ENOMEM));
        assert_eq!(alt.set(stack(8, 0x4000), 0), Err(libc::EINVAL));
        assert_eq!(alt.set(stack(0, 0x4000), 0), Ok(()));
        assert_eq!(alt.entry(0x500), Some(0x14000));
        assert_eq!(alt.query(0x500).flags, 0);
        assert_eq!(alt.query(0x14000).flags, SS_ONSTACK);
        assert_eq!(alt.entry(0x10001), None, "already on it");
        assert_eq!(alt.set(stack(SS_DISABLE, 0), 0x12000), Err(libc::EPERM));
        assert_eq!(alt.set(stack(SS_DISABLE, 0), 0x500), Ok(()));
        assert_eq!(alt.query(0x12000), StackT { sp: 0, flags: SS_DISABLE, pad: 0, size: 0 });
    }

    #[test]
    fn autodisarm() {
        let mut alt = AltStack::default();
        assert_eq!(alt.set(stack(SS_AUTODISARM, 0x4000), 0), Ok(()));
        assert_eq!(alt.query(0x12000).flags, SS_AUTODISARM);
        assert_eq!(alt.in_frame().flags, SS_AUTODISARM);
        alt.on_delivery();
        assert_eq!(alt.entry(0x500), None);
    }

    #[test]
    fn bytes_round_trip() {
        let stack = StackT { sp: 1, flags: 2, pad: 0, size: 3 };
        assert_eq!(StackT::from_bytes(&stack.to_bytes()), stack);
    }
}
