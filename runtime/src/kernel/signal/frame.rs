//! The signal frame of x86-64 Linux (`struct rt_sigframe`), byte for byte: builds it for a handler
//! of the guest's and reads it back for `rt_sigreturn`.
//!
//! Owns no data, accesses no guest memory, takes no lock. `process/delivery.rs` writes the frame to
//! the guest's stack and reads it. Test: a frame of the kernel's and one built here from the same
//! registers are the same bytes.
//!
//! ```text
//! guest sp (or the top of the alternate stack), less the red zone of 128 bytes
//!   extended state, 64-byte aligned            [`super::xstate`]
//!   ... alignment ...
//!   312  siginfo                    128 bytes
//!   304  uc_sigmask
//!   48   uc_mcontext                256 bytes
//!   8    uc_flags, uc_link, uc_stack
//!   0    return address: sa_restorer           new guest sp, 8 modulo 16
//! ```

use dynasour_guest::ThreadContext;

use super::altstack::StackT;
use super::{SigInfo, SigSet};

/// Bytes of the frame without the extended state.
pub const SIZE: usize = 440;
/// The ABI's red zone below the stack pointer.
pub const RED_ZONE: u64 = 128;
/// The offset of `uc` in the frame.
pub const UCONTEXT: u64 = 8;
/// The offset of `info` in the frame.
pub const SIGINFO: u64 = 312;

/// `uc_flags`: `UC_FP_XSTATE`, `UC_SIGCONTEXT_SS` and `UC_STRICT_RESTORE_SS`.
const UC_FLAGS: u64 = 1 | 2 | 4;

/// Offsets of fields in the frame.
mod at {
    pub const UC_FLAGS: usize = 8;
    pub const UC_STACK: usize = 24;
    pub const GREGS: usize = 48;
    pub const RIP: usize = GREGS + 16 * 8;
    pub const EFLAGS: usize = RIP + 8;
    pub const SELECTORS: usize = RIP + 16;
    pub const ERR: usize = RIP + 24;
    pub const TRAPNO: usize = RIP + 32;
    pub const OLDMASK: usize = RIP + 40;
    pub const CR2: usize = RIP + 48;
    pub const FPSTATE: usize = RIP + 56;
    pub const SIGMASK: usize = 304;
    pub const SIGINFO: usize = super::SIGINFO as usize;
}

/// The frame's register order: r8..r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, by encoding number.
pub(super) const ORDER: [usize; 16] = [8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 3, 2, 0, 1, 4];

/// Selectors of 64-bit user code and data.
pub const USER_CS: u16 = 0x33;
/// See [`USER_CS`].
pub const USER_DS: u16 = 0x2b;

/// RF, which is set in the rflags of a fault's frame.
pub const RESUME_FLAG: u64 = 0x10000;

/// Flags that returning from a signal may change (`FIX_EFLAGS`): AC, OF, DF, TF, SF, ZF, AF, PF,
/// CF.
///
/// The kernel restores RF, too. The next instruction clears it, so the guest cannot read it, not
/// even from r11 after `syscall`. So RF must not stay in the context; only the frame of a signal
/// that is delivered directly after the return shows it ([`Returned::resume_flag`]).
const RESTORABLE_FLAGS: u64 = 0x40000 | 0x800 | 0x400 | 0x100 | 0x80 | 0x40 | 0x10 | 4 | 1;

/// The contents of a frame besides the registers of the context.
#[derive(Clone, Copy, Debug)]
pub struct Contents<'a> {
    /// The address to which the handler returns.
    pub restorer: u64,
    /// The interrupted rflags, with RF for faults.
    pub rflags: u64,
    /// Error code, exception number and page fault address of the thread's last fault.
    pub fault: (u64, u64, u64),
    /// The mask to return to.
    pub mask: SigSet,
    /// The alternate stack.
    pub stack: StackT,
    /// The address of the extended state.
    pub fpstate: u64,
    /// The siginfo, for handlers that asked for it.
    pub info: Option<&'a SigInfo>,
}

/// Builds the frame of `context`'s registers. Without a siginfo the frame ends before it, because
/// the kernel does not write that memory then.
pub fn build(context: &ThreadContext, contents: &Contents<'_>) -> Vec<u8> {
    let mut frame = vec![0u8; SIZE];
    let mut put = |at: usize, value: u64| frame[at..at + 8].copy_from_slice(&value.to_le_bytes());
    put(0, contents.restorer);
    put(at::UC_FLAGS, UC_FLAGS);
    for (slot, &register) in ORDER.iter().enumerate() {
        put(at::GREGS + 8 * slot, context.gpr[register]);
    }
    put(at::RIP, context.rip);
    put(at::EFLAGS, contents.rflags);
    // cs, gs, fs, ss. On x86-64 the kernel writes zero for gs and fs.
    put(at::SELECTORS, u64::from(USER_DS) << 48 | u64::from(USER_CS));
    let (err, trapno, cr2) = contents.fault;
    put(at::ERR, err);
    put(at::TRAPNO, trapno);
    put(at::OLDMASK, contents.mask);
    put(at::CR2, cr2);
    put(at::FPSTATE, contents.fpstate);
    put(at::SIGMASK, contents.mask);
    frame[at::UC_STACK..at::UC_STACK + 24].copy_from_slice(&contents.stack.to_bytes());
    match contents.info {
        Some(info) => frame[at::SIGINFO..].copy_from_slice(&info.0),
        None => frame.truncate(at::SIGINFO),
    }
    frame
}

/// The contents of a frame that `rt_sigreturn` has read.
#[derive(Clone, Debug)]
pub struct Returned {
    /// General registers by encoding number.
    pub gpr: [u64; 16],
    /// The pc.
    pub rip: u64,
    /// The frame's rflags; see [`Returned::rflags`].
    eflags: u64,
    /// The code selector, which must be 64-bit user code.
    pub cs: u16,
    /// The stack selector.
    pub ss: u16,
    /// Whether `ss` must be restored as the frame has it (`UC_STRICT_RESTORE_SS`).
    pub strict_ss: bool,
    /// The mask to install.
    pub mask: SigSet,
    /// The alternate stack to install.
    pub stack: StackT,
    /// The address of the extended state; 0 for none.
    pub fpstate: u64,
}

impl Returned {
    /// Reads a frame.
    pub fn parse(frame: &[u8; SIZE]) -> Returned {
        let word =
            |at: usize| u64::from_le_bytes(frame[at..at + 8].try_into().expect("eight bytes"));
        let mut gpr = [0; 16];
        for (slot, &register) in ORDER.iter().enumerate() {
            gpr[register] = word(at::GREGS + 8 * slot);
        }
        let selectors = word(at::SELECTORS);
        let stack = frame[at::UC_STACK..at::UC_STACK + 24].try_into().expect("24 bytes");
        // The kernel sets the privilege level to 3.
        let (cs, ss) = (selectors as u16 | 3, (selectors >> 48) as u16 | 3);
        Returned {
            gpr,
            rip: word(at::RIP),
            eflags: word(at::EFLAGS),
            cs,
            ss,
            strict_ss: word(at::UC_FLAGS) & 4 != 0,
            mask: word(at::SIGMASK),
            stack: StackT::from_bytes(&stack),
            fpstate: word(at::FPSTATE),
        }
    }

    /// The rflags after the return: the restorable flags are the frame's, the others are those of
    /// `before`.
    pub fn rflags(&self, before: u64) -> u64 {
        before & !RESTORABLE_FLAGS | self.eflags & RESTORABLE_FLAGS
    }

    /// The RF bit of the frame's rflags.
    pub fn resume_flag(&self) -> u64 {
        self.eflags & RESUME_FLAG
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::xstate;

    /// The kernel's own frame is the reference: a handler copies it, and a frame that is built here
    /// from the same registers must have the same bytes.
    #[test]
    fn same_bytes_as_a_frame_of_the_kernels() {
        static mut COPY: [u8; SIZE] = [0; SIZE];
        static mut STATE: [u8; 16384] = [0; 16384];
        extern "C" fn handler(_: i32, _: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
            // SAFETY: the ucontext stands 8 bytes into the frame; the extended state is as long as
            // it says.
            unsafe {
                let frame = context.cast::<u8>().sub(UCONTEXT as usize);
                (&raw mut COPY).cast::<u8>().copy_from_nonoverlapping(frame, SIZE);
                let state = (*context).uc_mcontext.fpregs.cast::<u8>();
                let total = state.add(468).cast::<u32>().read() as usize;
                (&raw mut STATE).cast::<u8>().copy_from_nonoverlapping(state, total.min(16384));
            }
        }
        // SAFETY: a real-time signal that nothing else uses, sent to this thread.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(50, &action, std::ptr::null_mut()), 0);
            assert_eq!(libc::pthread_kill(libc::pthread_self(), 50), 0);
        }
        // SAFETY: the handler has run.
        let (kernel, state) = unsafe { ((&raw const COPY).read(), (&raw const STATE).read()) };

        let returned = Returned::parse(&kernel);
        assert_eq!((returned.cs, returned.ss), (USER_CS, USER_DS));
        assert_eq!(returned.fpstate % 64, 0);
        let mut context = ThreadContext::new();
        context.gpr = returned.gpr;
        context.rip = returned.rip;
        let word =
            |at: usize| u64::from_le_bytes(kernel[at..at + 8].try_into().expect("eight bytes"));
        let info = SigInfo(kernel[at::SIGINFO..].try_into().expect("128 bytes"));
        assert_eq!((info.signo(), info.code()), (50, -6));
        let contents = Contents {
            restorer: word(0),
            rflags: returned.eflags,
            fault: (word(at::ERR), word(at::TRAPNO), word(at::CR2)),
            mask: returned.mask,
            stack: returned.stack,
            fpstate: returned.fpstate,
            info: Some(&info),
        };
        assert_eq!(build(&context, &contents), kernel);
        assert_eq!(build(&context, &Contents { info: None, ..contents }), kernel[..at::SIGINFO]);

        // The extended state must have the same description and the same size, and reading and
        // writing it again must not change it.
        let layout = xstate::layout();
        let total = layout.size + xstate::MAGIC2_SIZE;
        let description = xstate::save(&context.xstate).bytes;
        assert_eq!(description.len(), total);
        assert_eq!(description[464..512], state[464..512]);
        assert_eq!(description[layout.size..], state[layout.size..total]);
        let base = returned.fpstate;
        let read = |address: u64, out: &mut [u8]| {
            let start = (address - base) as usize;
            out.copy_from_slice(&state[start..start + out.len()]);
            Ok(())
        };
        assert_eq!(xstate::restore(&mut context.xstate, base, read), Ok(()));
        let again = xstate::save(&context.xstate).bytes;
        let mut other = ThreadContext::new();
        // Apart from bytes 464 on of the legacy area, all components in use must be as the kernel
        // has written them.
        assert_eq!(again[0..416], state[0..416]);
        assert_eq!(again[512..520], state[512..520]);
        assert_eq!(xstate::restore(&mut other.xstate, base, read), Ok(()));
        assert_eq!(xstate::save(&other.xstate).bytes, again);
    }

    #[test]
    fn only_restorable_flags_return() {
        let mut frame = [0u8; SIZE];
        frame[at::EFLAGS..at::EFLAGS + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        let returned = Returned::parse(&frame);
        assert_eq!(returned.rflags(0x202), 0x202 | RESTORABLE_FLAGS);
        frame[at::EFLAGS..at::EFLAGS + 8].fill(0);
        assert_eq!(Returned::parse(&frame).rflags(0x246), 0x202);
    }
}
