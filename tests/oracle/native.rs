//! The processor as the oracle: a forked copy of this process in which the guest runs natively, one
//! step at a time.
//!
//! The fork happens when the guest is loaded, so both processes have the same bytes at the same
//! addresses. The child only asks to be traced and stops. Then its registers are set to the guest's
//! start state, and it never returns to the code of this process.
//!
//! Single-stepping has two visible effects, which are repaired after the step: `pushf` stores the
//! trap flag, and `syscall` copies it to r11. Elsewhere `ptrace` hides it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use dynasour_guest::ThreadContext;
use dynasour_guest::context::XSTATE_SIZE;
use iced_x86::{Instruction, Mnemonic};
use libc::{c_int, c_uint, c_void, iovec, user_regs_struct};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

/// The trap flag of rflags.
pub const TRAP_FLAG: u64 = 1 << 8;

const NT_X86_XSTATE: c_uint = 0x202;
/// Byte offset of the header's XSTATE_BV in an XSAVE area.
const STATE_BITS: usize = 512;
/// x87, SSE, AVX, mask registers, AVX-512: the components whose initial state the guest starts
/// with.
const USER_COMPONENTS: u64 = 0xe7;
const DEFAULT_CONTROL_WORD: u16 = 0x37f;
const DEFAULT_MXCSR: u32 = 0x1f80;
/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The instruction is done.
    Stepped,
    /// The instruction raised this signal, which has not been delivered to the process yet.
    Signal(c_int),
    /// The process has exited.
    Exited(i32),
    /// The process has been killed by this signal.
    Killed(c_int),
}

/// The traced process. Dropping it kills it.
pub struct Native {
    pid: Pid,
    memory: File,
    ended: bool,
}

impl Native {
    /// Forks, and gives the child the registers of `context` and the extended state of a new
    /// process. The child's standard output is discarded.
    pub fn start(context: &ThreadContext) -> io::Result<Native> {
        let discard = OpenOptions::new().write(true).open("/dev/null")?;
        let disabled =
            libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: the child only makes system calls, and then stops for good.
        let pid = match unsafe { fork() }? {
            ForkResult::Parent { child } => child,
            // SAFETY: raw system calls on plain numbers. A new process has no handlers and no
            // alternate signal stack.
            ForkResult::Child => unsafe {
                libc::sigaltstack(&disabled, std::ptr::null_mut());
                libc::dup2(discard.as_raw_fd(), libc::STDOUT_FILENO);
                for signal in
                    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP]
                {
                    libc::signal(signal, libc::SIG_DFL);
                }
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) == 0 {
                    libc::raise(libc::SIGSTOP);
                }
                libc::_exit(126)
            },
        };
        match waitpid(pid, None)? {
            WaitStatus::Stopped(_, Signal::SIGSTOP) => {}
            other => {
                return Err(io::Error::other(format!("ptrace is not allowed here: {other:?}")));
            }
        }
        ptrace::setoptions(pid, ptrace::Options::PTRACE_O_EXITKILL)?;
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let mut native = Native { pid, memory, ended: false };
        native.set_start_state(context)?;
        Ok(native)
    }

    fn set_start_state(&mut self, context: &ThreadContext) -> io::Result<()> {
        let mut state = vec![0; XSTATE_SIZE];
        let len = self.xstate(&mut state)?;
        let mut bits =
            u64::from_le_bytes(state[STATE_BITS..STATE_BITS + 8].try_into().expect("eight bytes"));
        bits &= !USER_COMPONENTS;
        state[STATE_BITS..STATE_BITS + 8].copy_from_slice(&bits.to_le_bytes());
        state[0..2].copy_from_slice(&DEFAULT_CONTROL_WORD.to_le_bytes());
        state[24..28].copy_from_slice(&DEFAULT_MXCSR.to_le_bytes());
        self.transfer_xstate(libc::PTRACE_SETREGSET, &mut state[..len])?;

        let mut registers = self.registers()?;
        set_gprs(&mut registers, &context.gpr);
        registers.rip = context.rip;
        registers.eflags = context.rflags;
        registers.fs_base = context.fs_base;
        registers.gs_base = context.gs_base;
        // The child stands in a system call, which must not be restarted.
        registers.orig_rax = u64::MAX;
        Ok(ptrace::setregs(self.pid, registers)?)
    }

    /// The registers.
    pub fn registers(&self) -> io::Result<user_regs_struct> {
        Ok(ptrace::getregs(self.pid)?)
    }

    /// Copies the extended state in the standard XSAVE format to `state`; returns its length.
    pub fn xstate(&self, state: &mut [u8]) -> io::Result<usize> {
        self.transfer_xstate(libc::PTRACE_GETREGSET, state)
    }

    fn transfer_xstate(&self, request: c_uint, state: &mut [u8]) -> io::Result<usize> {
        let mut vector =
            iovec { iov_base: state.as_mut_ptr().cast::<c_void>(), iov_len: state.len() };
        // SAFETY: the kernel reads or writes at most the vector's length.
        let result =
            unsafe { libc::ptrace(request, self.pid.as_raw(), NT_X86_XSTATE, &raw mut vector) };
        if result == 0 { Ok(vector.iov_len) } else { Err(io::Error::last_os_error()) }
    }

    /// Reads memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(bytes, address)
    }

    /// Executes `inst`, at which the process stands, completely: all iterations of a repeated
    /// string instruction.
    pub fn step(&mut self, inst: &Instruction) -> io::Result<Event> {
        // rt_sigreturn takes r11 from the frame.
        let keeps_r11 = inst.mnemonic() == Mnemonic::Syscall
            && self.registers()?.rax == libc::SYS_rt_sigreturn as u64;
        let mut event = self.step_once(None)?;
        let repeats =
            inst.is_string_instruction() && (inst.has_rep_prefix() || inst.has_repne_prefix());
        while repeats && event == Event::Stepped && self.registers()?.rip == inst.ip() {
            event = self.step_once(None)?;
        }
        if event == Event::Stepped {
            // `int3` stops the process like a step.
            if inst.mnemonic() == Mnemonic::Int3 {
                return Ok(Event::Signal(libc::SIGTRAP));
            }
            if !keeps_r11 {
                self.hide_trap_flag(inst)?;
            }
        }
        Ok(event)
    }

    /// Delivers the signal that the process has raised.
    pub fn deliver(&mut self, signal: c_int) -> io::Result<Event> {
        self.step_once(Some(Signal::try_from(signal)?))
    }

    fn step_once(&mut self, signal: Option<Signal>) -> io::Result<Event> {
        ptrace::step(self.pid, signal)?;
        let event = match waitpid(self.pid, None)? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => Event::Stepped,
            WaitStatus::Stopped(_, signal) => Event::Signal(signal as c_int),
            WaitStatus::Exited(_, status) => Event::Exited(status),
            WaitStatus::Signaled(_, signal, _) => Event::Killed(signal as c_int),
            other => return Err(io::Error::other(format!("{other:?}"))),
        };
        self.ended = matches!(event, Event::Exited(_) | Event::Killed(_));
        Ok(event)
    }

    fn hide_trap_flag(&mut self, inst: &Instruction) -> io::Result<()> {
        match inst.mnemonic() {
            Mnemonic::Syscall => {
                let mut registers = self.registers()?;
                registers.r11 &= !TRAP_FLAG;
                ptrace::setregs(self.pid, registers)?;
            }
            Mnemonic::Pushf | Mnemonic::Pushfq => {
                let second_byte = self.registers()?.rsp + 1;
                let mut byte = [0];
                self.read(second_byte, &mut byte)?;
                self.memory.write_all_at(&[byte[0] & !(TRAP_FLAG >> 8) as u8], second_byte)?;
            }
            _ => {}
        }
        Ok(())
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        if !self.ended {
            // The process is ours and stopped; should either call fail, PTRACE_O_EXITKILL ends it
            // with us.
            let _ = nix::sys::signal::kill(self.pid, Signal::SIGKILL);
            let _ = waitpid(self.pid, None);
        }
    }
}

/// The general registers in encoding order.
pub fn gprs(r: &user_regs_struct) -> [u64; 16] {
    [
        r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12,
        r.r13, r.r14, r.r15,
    ]
}

fn set_gprs(r: &mut user_regs_struct, gpr: &[u64; 16]) {
    [
        r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12,
        r.r13, r.r14, r.r15,
    ] = *gpr;
}
