//! The death of the guest by a signal: as natively, core file included.
//!
//! ```text
//!   killed ──► all signals blocked ──► the signal is pending ──► rt_sigreturn ──► the kernel kills
//!              default action          for this thread           to the guest's registers
//! ```
//!
//! The kernel performs the default action, so the wait status is right. If it writes a core file,
//! the file has the registers of each thread. So the thread that dies returns to the guest's state:
//! the signal is delivered before the guest executes an instruction.
//!
//! The kernel kills for signals without a handler that are not among the six, and does not ask the
//! host. Then the core file shows the translator at work, unless the thread sends the signal to itself
//! (`abort`): [`System::suicide`].
//!
//! Data: [`Death`], made while the guest's state still exists. Used by the dying thread; no lock.
//!
//! Example: a guest reads address 0 and has no handler. Its core file says SIGSEGV, SEGV_MAPERR, and
//! the pc of the load.

use std::arch::asm;

use dynasour_guest::ThreadContext;

use super::{Done, System};
use crate::kernel::entry::{self, Call};
use crate::kernel::signal::frame::{self, Contents};
use crate::kernel::signal::{self, MAX_SIGNAL, SigAction, SigInfo, SigSet, set_of};
use crate::kernel::xstate;

/// Signals, besides the six, whose default action writes a core file (manual: signal(7)).
const WITH_CORE: SigSet =
    set_of(libc::SIGQUIT) | set_of(libc::SIGABRT) | set_of(libc::SIGXCPU) | set_of(libc::SIGXFSZ);

/// What the kernel needs to kill a thread in the guest's state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Death {
    signo: i32,
    /// How the signal was sent; none if nobody knows.
    info: Option<SigInfo>,
    /// A signal frame without siginfo, which names the address of the extended state behind it.
    frame: Box<[Line]>,
    /// The FS base and the GS base.
    bases: [u64; 2],
}

/// The extended state must be aligned so (Intel SDM vol. 1, "XSAVE").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C, align(64))]
struct Line([u8; LINE]);
const LINE: usize = 64;

impl Death {
    /// The death by `signo` of the thread whose state is in `context`.
    pub fn of(signo: i32, context: &ThreadContext, system: &System) -> Death {
        let by = system.killed_by.filter(|(info, _)| info.signo() == signo);
        let state = xstate::save(&context.xstate).bytes;
        let before_state = (frame::SIGINFO as usize).next_multiple_of(LINE);
        let mut lines = vec![Line([0; LINE]); (before_state + state.len()).div_ceil(LINE)];
        let contents = Contents {
            restorer: 0,
            rflags: by.map_or(context.rflags, |(_, rflags)| rflags),
            fault: system.fault,
            mask: !set_of(signo),
            stack: system.altstack.in_frame(),
            fpstate: lines.as_ptr() as u64 + before_state as u64,
            info: None,
        };
        let mut bytes = frame::build(context, &contents);
        bytes.resize(before_state, 0);
        bytes.extend(state);
        for (line, bytes) in lines.iter_mut().zip(bytes.chunks(LINE)) {
            line.0[..bytes.len()].copy_from_slice(bytes);
        }
        Death {
            signo,
            info: by.map(|(info, _)| info),
            frame: lines.into(),
            bases: [context.fs_base, context.gs_base],
        }
    }

    /// Kills the process.
    pub fn happen(self) -> ! {
        signal::set_kernel_mask(!0);
        signal::set_kernel_action(self.signo, &SigAction::default());
        // SAFETY: sends a signal, and reads `info`. Behind the return address there is a frame as
        // `rt_sigreturn` expects it, in memory that is never freed. Only this signal can come then,
        // so no code of the host's runs with the guest's bases.
        unsafe {
            let (pid, tid) = (signal::own_pid() as u64, signal::own_tid() as u64);
            let info = self.info.as_ref().map_or(0, |info| std::ptr::from_ref(info) as u64);
            let args = [pid, tid, self.signo as u64, info];
            if info == 0 || entry::raw(&Call::new(libc::SYS_rt_tgsigqueueinfo, &args)) != 0 {
                entry::raw(&Call::new(libc::SYS_tgkill, &args[..3]));
            }
            asm!(
                "wrfsbase {fs}",
                "wrgsbase {gs}",
                "mov rsp, {frame}",
                "mov eax, {rt_sigreturn}",
                "syscall",
                "ud2",
                fs = in(reg) self.bases[0],
                gs = in(reg) self.bases[1],
                frame = in(reg) self.frame.as_ptr() as u64 + 8,
                rt_sigreturn = const libc::SYS_rt_sigreturn,
                options(noreturn)
            )
        }
    }
}

impl System {
    /// `tkill` and `tgkill`, if the thread kills itself by a signal that writes a core file; none
    /// if the kernel is to perform the call.
    pub(crate) fn suicide(
        &mut self,
        context: &mut ThreadContext,
        nr: i64,
        call: &Call,
    ) -> Option<Done> {
        let [a, b, c] = [call.args[0] as i32, call.args[1] as i32, call.args[2] as i32];
        let (pid, tid) = (signal::own_pid(), signal::own_tid());
        let signo = match nr {
            libc::SYS_tkill if a == tid => b,
            libc::SYS_tgkill if (a, b) == (pid, tid) => c,
            _ => return None,
        };
        let is_core = (1..=MAX_SIGNAL).contains(&signo) && WITH_CORE & set_of(signo) != 0;
        if !is_core
            || self.process.action(signo).handler != signal::SIG_DFL
            || self.mask & set_of(signo) != 0
            || is_traced()
        {
            return None;
        }
        // SAFETY: asks only.
        let uid = unsafe { entry::raw(&Call::new(libc::SYS_getuid, &[])) };
        let sender = pid as u64 & 0xffff_ffff | (uid as u64) << 32;
        // As after the call.
        (context.gpr[0], context.gpr[1], context.gpr[11]) = (0, context.rip, context.rflags);
        let info = SigInfo::of_fault(signo, libc::SI_TKILL, sender);
        Some(Done::Outcome(self.killed(signo, &info, context.rflags)))
    }
}

/// May a tracer keep a signal from this process? Yes, if nobody knows.
fn is_traced() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    !status.lines().any(|line| line == "TracerPid:\t0")
}
