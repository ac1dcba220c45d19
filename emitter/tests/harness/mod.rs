//! Runs compiled versions in process, on real memory, with a SIGSEGV/SIGFPE handler as the runtime
//! has one.

#![allow(dead_code, reason = "each test crate uses its part")]

use dynasour_emitter::{
    Config, Deopt, Emitter, EntryState, ExitId, ExitReason, FragmentId, Returns, SiteKind, set_gs,
};
use dynasour_guest::ThreadContext;
use dynasour_ir::eval::State;
use dynasour_ir::semantics::ARITH_FLAGS;
use dynasour_ir::{AnchorId, Version};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A guest thread in a test.
pub struct Bench {
    pub emitter: Box<Emitter>,
    pub ctx: Box<ThreadContext>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub anchor: AnchorId,
    pub pc: u64,
    pub state: State,
    pub deopt: Deopt,
}

thread_local! {
    static ACTIVE: AtomicPtr<Emitter> = const { AtomicPtr::new(std::ptr::null_mut()) };
}

extern "C" fn on_fault(
    signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid ucontext; tests enter fragments with the host's FS base in
    // place, so thread locals work here; the emitter outlives the run.
    unsafe {
        let context = &mut *context.cast::<libc::ucontext_t>();
        let rip = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
        let emitter = ACTIVE.with(|e| e.load(Ordering::Relaxed));
        match emitter.as_ref().and_then(|e| e.fault_exit(*rip as u64)) {
            Some(cold) => *rip = cold as i64,
            None => {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
}

fn install_handlers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE] {
            // SAFETY: installs a handler that only reads tables and redirects rip.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    });
}

fn host_fs_base() -> u64 {
    let base;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("rdfsbase {}", out(reg) base, options(nomem, nostack)) };
    base
}

impl Bench {
    pub fn new() -> Bench {
        Bench::with_cache(1 << 20)
    }

    pub fn with_cache(cache_size: usize) -> Bench {
        Bench::with(Config { cache_size, ..Config::default() })
    }

    /// Its fragments count.
    pub fn counting() -> Bench {
        Bench::with(Config { cache_size: 1 << 20, count: true, ..Config::default() })
    }

    /// Its indirect transfers name themselves.
    pub fn naming_transfers() -> Bench {
        Bench::with(Config { cache_size: 1 << 20, names_transfers: true, ..Config::default() })
    }

    /// Copied blocks return by the processor's return stack.
    pub fn returning_by_stack() -> Bench {
        Bench::with(Config { returns: Returns::Stack, ..Config::default() })
    }

    /// Guest code runs in place; its ways out are never taken.
    pub fn in_place() -> Bench {
        Bench::with(Config {
            way_out: Some(|number, _| Some(0x1000 + number)),
            ..Config::default()
        })
    }

    fn with(config: Config) -> Bench {
        install_handlers();
        let emitter = Box::new(Emitter::new(config).unwrap());
        let mut ctx = ThreadContext::new();
        ctx.fs_base = host_fs_base();
        // SAFETY: nothing else uses GS on this thread.
        unsafe { set_gs(&mut *ctx) };
        Bench { emitter, ctx }
    }

    pub fn compile(&mut self, version: &Version) -> FragmentId {
        self.emitter
            .compile(version, EntryState::Canonical)
            .unwrap_or_else(|e| panic!("{e}\n{version}"))
    }

    /// Enters a fragment with a state; returns how it left. Deferred stores are performed.
    pub fn run(&mut self, fragment: FragmentId, state: &State) -> Outcome {
        self.ctx.gpr = state.gpr;
        self.ctx.rflags = 0x202 | state.flags;
        self.resume(fragment)
    }

    /// The indirect end of a fragment that has one.
    pub fn indirect_end(&self, fragment: FragmentId) -> ExitId {
        let mut exits = self.emitter.fragment(fragment).unwrap().exits.clone().map(ExitId);
        exits.find(|e| self.emitter.exit(*e).unwrap().kind == SiteKind::EndIndirect).unwrap()
    }

    /// Enters a fragment with the state in the context.
    pub fn resume(&mut self, fragment: FragmentId) -> Outcome {
        ACTIVE.with(|e| e.store(&mut *self.emitter, Ordering::Relaxed));
        // SAFETY: GS points to this context; the guests of the tests stay within the tests' memory.
        let left = unsafe {
            set_gs(&mut *self.ctx);
            self.emitter.enter(&mut *self.ctx, fragment).unwrap()
        };
        let exit = match left {
            ExitReason::Exit(exit) => exit,
            ExitReason::Indirect(_) => self.indirect_end(fragment),
            left => panic!("left by {left:?}"),
        };
        let deopt = self.emitter.deopt(exit, &mut self.ctx).unwrap();
        for store in &deopt.stores {
            // SAFETY: deferred stores go to the tests' memory.
            unsafe {
                let bytes = store.value.to_le_bytes();
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    store.address as *mut u8,
                    store.size as usize,
                );
            }
        }
        let state = State { gpr: self.ctx.gpr, flags: self.ctx.rflags & ARITH_FLAGS };
        let anchor = self.emitter.exit(exit).unwrap().anchor;
        Outcome { anchor, pc: self.ctx.rip, state, deopt }
    }
}

/// Memory at a fixed address for guests.
pub struct Area {
    pub start: u64,
    pub len: usize,
}

impl Area {
    pub fn new(start: u64, len: usize) -> Area {
        // SAFETY: never replaces a mapping.
        let p = unsafe {
            libc::mmap(
                start as *mut _,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        assert_eq!(p as u64, start, "{}", std::io::Error::last_os_error());
        Area { start, len }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped above; guests run only while nobody holds this borrow.
        unsafe { std::slice::from_raw_parts(self.start as *const u8, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start as *mut u8, self.len) }
    }

    pub fn protect(&self, offset: usize, len: usize, writable: bool) {
        let prot = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: within the area.
        let r = unsafe { libc::mprotect((self.start as usize + offset) as *mut _, len, prot) };
        assert_eq!(r, 0);
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the area is ours.
        unsafe { libc::munmap(self.start as *mut _, self.len) };
    }
}
