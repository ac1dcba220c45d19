//! The environment of the programs: code and data at fixed addresses, start states, and the two
//! executions.

use crate::fragments::program::{CODE, COUNTER, Program};
use crate::state::{Extended, Registers};
use dynasour_emitter::{
    Config as EmitterConfig, Emitter, ExitId, ExitReason, FragmentId, SiteKind,
};
use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Reader};
use dynasour_guest::lift::Bytes;
use dynasour_guest::lift::Fetch;
use dynasour_guest::space::Brk;
use dynasour_ir::Trap;
use dynasour_runtime::interp::{self, Interp, Stop};
use dynasour_runtime::kernel::process::{Config, Inherited, System};
use dynasour_runtime::kernel::signal::FaultHooks;
use dynasour_runtime::memory;
use dynasour_testkit::code::{Random, randomise_extended};
use iced_x86::{Code, OpKind, Register};
use std::sync::atomic::{AtomicPtr, Ordering};

const PAGE: usize = 4096;
const CODE_SIZE: usize = 4 * PAGE;
/// Address of the arena. Nothing is mapped directly below and above it.
pub const DATA: u64 = 0x5100_0000;
const DATA_SIZE: usize = 4 * PAGE;
/// XSAVE components to compare: x87, SSE, AVX, mask registers, AVX-512, as far as the processor has
/// them.
const COMPONENTS: u64 = 0xe7;
const VISIBLE_FLAGS: u64 = 0xcd5;
const CACHE_SIZE: usize = 4 << 20;
/// The most instructions to interpret while searching for the state in which a fragment left.
const SEARCH: usize = 20_000;

static EMITTER: AtomicPtr<Emitter> = AtomicPtr::new(std::ptr::null_mut());

fn fragment_fault(host_rip: u64) -> Option<u64> {
    // SAFETY: this is the world's emitter, which is never dropped and does not change while a
    // fragment runs.
    let emitter = unsafe { EMITTER.load(Ordering::Relaxed).as_ref() }?;
    emitter.cache().range().contains(&host_rip).then(|| emitter.fault_exit(host_rip)).flatten()
}

/// The bytes of the program, for the lifter and the emitter.
struct ProgramCode;

impl Fetch for ProgramCode {
    fn fetch(&self, address: u64, buffer: &mut [u8]) -> usize {
        code().fetch(address, buffer)
    }
}

fn code() -> Bytes<'static> {
    // SAFETY: mapped for the life of the process by `World::new`; written only between executions.
    let bytes = unsafe { std::slice::from_raw_parts(CODE as *const u8, CODE_SIZE) };
    Bytes { start: CODE, bytes }
}

/// A complete guest state: the context's registers and the arena.
pub struct State {
    pub context: Box<ThreadContext>,
    pub data: Vec<u8>,
}

impl State {
    pub fn new() -> State {
        State { context: ThreadContext::new(), data: vec![0; DATA_SIZE] }
    }

    /// A copy of `other`.
    pub fn new_from(other: &State) -> State {
        let mut state = State::new();
        state.copy_from(other);
        state
    }

    /// Makes a random state in which the program's pointers point into the arena.
    pub fn random(&mut self, pc: u64, random: &mut Random) {
        for word in self.data.chunks_exact_mut(8) {
            let value = if random.one_in(2) { random.word() } else { random.float() };
            word.copy_from_slice(&value.to_le_bytes());
        }
        let context = &mut *self.context;
        context.rip = pc;
        for gpr in &mut context.gpr {
            *gpr = random.word();
        }
        let middle = DATA + DATA_SIZE as u64 / 2;
        let gpr = &mut context.gpr;
        gpr[4] = middle - 1024 + 8 * random.below(16);
        gpr[14] = middle + 64 * random.below(4);
        for pointer in [12, 5] {
            gpr[pointer] = match random.below(8) {
                0..3 => gpr[14] + [0, 8, 4, 1, 16, 64][random.below(6) as usize],
                3 => gpr[4] + 8 * random.below(4),
                4 if random.one_in(4) => DATA + DATA_SIZE as u64 - random.below(128),
                _ => middle + 512 + 8 * random.below(64),
            };
        }
        gpr[13] = 8 * random.below(4);
        self.set_counter(random);
        let context = &mut *self.context;
        let direction = if random.one_in(24) { 1 << 10 } else { 0 };
        context.rflags = 0x202 | random.next() & 0x8d5 | direction;
        context.fs_base = 0x7654_3210_0000;
        randomise_extended(&mut context.xstate.0, random);
        // SAFETY: reads a register.
        let enabled = unsafe { enabled_components() };
        let mut valid = COMPONENTS & enabled;
        if random.one_in(4) {
            valid &= random.next();
        }
        context.xstate.0[512..520].copy_from_slice(&valid.to_le_bytes());
        if valid & 6 == 0 {
            context.xstate.0[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
        }
    }

    /// Changes a few registers and words, so that some guards fail.
    pub fn disturb(&mut self, random: &mut Random) {
        const FREE: [usize; 10] = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11];
        for _ in 0..random.below(4) {
            self.context.gpr[FREE[random.below(10) as usize]] = random.word();
        }
        for _ in 0..random.below(4) {
            let at = DATA_SIZE / 2 + 8 * random.below(64) as usize;
            self.data[at..at + 8].copy_from_slice(&random.word().to_le_bytes());
        }
        self.set_counter(random);
    }

    /// Sets both possible loop counters to few iterations.
    fn set_counter(&mut self, random: &mut Random) {
        self.context.gpr[15] = 1 + random.below(20);
        let at = (self.context.gpr[14].wrapping_sub(DATA) + COUNTER) as usize;
        if let Some(word) = self.data.get_mut(at..at + 8) {
            word.copy_from_slice(&(1 + random.below(20)).to_le_bytes());
        }
    }

    pub fn copy_from(&mut self, other: &State) {
        let (to, from) = (&mut *self.context, &*other.context);
        to.gpr = from.gpr;
        to.rip = from.rip;
        to.rflags = from.rflags;
        to.fs_base = from.fs_base;
        to.gs_base = from.gs_base;
        to.xstate.0 = from.xstate.0;
        self.data.copy_from_slice(&other.data);
    }

    fn registers(&self) -> Registers {
        let mut registers = Registers::interpreted(&self.context);
        registers.rflags &= VISIBLE_FLAGS;
        registers
    }

    /// The differences between `self`, the state in which a fragment left, and the interpreter's
    /// state.
    pub fn differences(&self, interpreted: &State) -> Vec<String> {
        let mut out = self.registers().differences(&interpreted.registers());
        let extended = |s: &State| Extended::from_area(&s.context.xstate.0);
        out.extend(extended(self).differences(&extended(interpreted)));
        if self.data == interpreted.data {
            return out; // nearly always
        }
        let words = self.data.chunks(8).zip(interpreted.data.chunks(8)).enumerate();
        for (index, (native, ours)) in words.filter(|(_, (native, ours))| native != ours) {
            out.push(format!(
                "[{:#x}]: native {native:02x?}, interpreted {ours:02x?}",
                DATA + 8 * index as u64
            ));
        }
        out
    }
}

#[target_feature(enable = "xsave")]
fn enabled_components() -> u64 {
    // SAFETY: register 0 always exists.
    unsafe { std::arch::x86_64::_xgetbv(0) }
}

/// How a fragment left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exit {
    /// `None`: an indirect end of some fragment did not find its target.
    pub id: Option<ExitId>,
    pub kind: SiteKind,
}

/// The process as an environment for programs. There is one in a process, and it is never dropped.
pub struct World {
    pub emitter: &'static mut Emitter,
    interp: Interp,
    /// The state of native execution; GS points to its context.
    pub native: State,
    pub ours: State,
    _system: Box<System>,
}

impl World {
    pub fn new() -> World {
        let inherited = Inherited::record();
        for (start, size) in [(CODE, CODE_SIZE), (DATA, DATA_SIZE)] {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            // SAFETY: replaces nothing.
            let got = unsafe { libc::mmap(start as *mut libc::c_void, size, prot, flags, -1, 0) };
            assert_eq!(got as u64, start, "{}", std::io::Error::last_os_error());
        }
        let emitter =
            Emitter::new(EmitterConfig { cache_size: CACHE_SIZE, ..EmitterConfig::default() })
                .expect("a code cache");
        let emitter = Box::leak(Box::new(emitter));
        EMITTER.store(emitter, Ordering::Relaxed);
        let brk = Brk::new(0).expect("room for a break");
        let config = Config::alone(c"/guest".to_owned(), brk);
        let mut system = Box::new(System::new(inherited, config));
        let mut native = State::new();
        let hooks = FaultHooks {
            thunk: interp::thunk_fixup,
            fragment: fragment_fault,
            accepted: |_, _| None,
            cache_end: |_| None,
        };
        // SAFETY: both are boxed and live as long as the process, which has one world.
        unsafe { system.start(&mut native.context, hooks) }.expect("memory for a stack");
        let interp = Interp::with_code(Box::new(ProgramCode));
        World { emitter, interp, native, ours: State::new(), _system: system }
    }

    /// Writes a program to its address and makes it read-only, so that it cannot change itself.
    pub fn load(&mut self, program: &Program) {
        assert!(program.bytes.len() <= CODE_SIZE);
        let protect = |prot| {
            // SAFETY: the pages are ours, and no slice of them is kept.
            let result = unsafe { libc::mprotect(CODE as *mut libc::c_void, CODE_SIZE, prot) };
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        };
        protect(libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: as above, and they are writable now.
        unsafe {
            std::ptr::write_bytes(CODE as *mut u8, 0xcc, CODE_SIZE);
            std::ptr::copy_nonoverlapping(
                program.bytes.as_ptr(),
                CODE as *mut u8,
                program.bytes.len(),
            );
        }
        protect(libc::PROT_READ);
        self.interp.invalidate_all();
    }

    /// The code, for the lifter.
    pub fn code(&self) -> impl Fetch + use<> {
        ProgramCode
    }

    fn write_data(data: &[u8]) {
        // SAFETY: the arena is ours; no reference to it is kept.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), DATA as *mut u8, DATA_SIZE) };
    }

    fn read_data(data: &mut [u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(DATA as *const u8, data.as_mut_ptr(), DATA_SIZE) };
    }

    /// Sets the interpreter's state to `start`.
    pub fn begin(&mut self, start: &State) {
        self.ours.copy_from(start);
        World::write_data(&start.data);
    }

    /// Interprets one instruction; `None` if it completed.
    pub fn interpret(&mut self) -> Option<Stop<std::convert::Infallible>> {
        let stopped = self.interp.run_one(&mut self.ours.context);
        match stopped {
            Some(Stop::Trap { pc, trap: Trap::Protection }) if self.enters_non_canonical(pc) => {
                None
            }
            stopped => stopped,
        }
    }

    /// An indirect transfer to a non-canonical address is refused by the interpreter, as by the
    /// processor. Native code, which is compared with it, first jumps there (and the runtime goes
    /// back, [`Emitter::transfer`]). So if the instruction at `pc` is such a transfer, this sets
    /// the interpreter's rip to its target.
    fn enters_non_canonical(&mut self, pc: u64) -> bool {
        let Decoded::Inst(inst) = Reader::new(&ProgramCode).decode(pc) else { return false };
        let context = &mut *self.ours.context;
        let (fs_base, gpr) = (context.fs_base, &mut context.gpr);
        let rsp = Register::RSP.number();
        let taken = match inst.code() {
            Code::Retnq => 8,
            Code::Retnq_imm16 => 8 + u64::from(inst.immediate16()),
            Code::Call_rm64 => 8u64.wrapping_neg(),
            Code::Jmp_rm64 => 0,
            _ => return false,
        };
        let register = |register: Register, _: usize, _: usize| match register {
            Register::FS => Some(fs_base),
            other if other.is_gpr64() => Some(gpr[other.number()]),
            other if other.is_gpr32() => Some(u64::from(gpr[other.number()] as u32)),
            _ => Some(0),
        };
        let address = match inst.op0_kind() {
            _ if matches!(inst.code(), Code::Retnq | Code::Retnq_imm16) => Some(gpr[rsp]),
            OpKind::Memory => inst.virtual_address(0, 0, register),
            _ => None,
        };
        let target = match address {
            Some(address) => {
                let mut bytes = [0; 8];
                assert_eq!(memory::copy_in(address, &mut bytes), 8, "the interpreter has read it");
                u64::from_le_bytes(bytes)
            }
            None => gpr[inst.op0_register().number()],
        };
        let non_canonical = (target as i64) << 16 >> 16 != target as i64;
        if non_canonical {
            gpr[rsp] = gpr[rsp].wrapping_add(taken);
            context.rip = target;
        }
        non_canonical
    }

    /// Does the program end by itself from `start`? (An overwritten return address can make it loop
    /// forever.)
    pub fn ends(&mut self, start: &State) -> bool {
        self.begin(start);
        (0..SEARCH).any(|_| self.interpret().is_some())
    }

    /// Runs a fragment from `start` until it leaves; the state is then in `self.native`.
    pub fn run_native(&mut self, fragment: FragmentId, start: &State) -> Exit {
        self.native.copy_from(start);
        World::write_data(&start.data);
        // SAFETY: GS points to this context; the programs access only the arena, or fault.
        let left = unsafe { self.emitter.enter(&mut *self.native.context, fragment) }
            .expect("the fragment exists");
        let id = match left {
            ExitReason::Exit(id) => id,
            ExitReason::Indirect(_) => {
                self.native.context.rip = self.native.context.next_pc;
                World::read_data(&mut self.native.data);
                return Exit { id: None, kind: SiteKind::EndIndirect };
            }
            left => panic!("left by {left:?}"),
        };
        let deopt =
            self.emitter.deopt(id, &mut self.native.context).expect("the exit has a record");
        for store in &deopt.stores {
            let bytes = &store.value.to_le_bytes()[..store.size as usize];
            // SAFETY: a store that the program makes.
            let copied = unsafe { dynasour_runtime::changes::host::copy_out(store.address, bytes) };
            assert_eq!(copied, bytes.len(), "a deferred store faults");
        }
        World::read_data(&mut self.native.data);
        Exit { id: Some(id), kind: deopt.kind }
    }

    /// Copies the arena to `self.native`, after native code has run.
    pub fn native_ran(&mut self) {
        World::read_data(&mut self.native.data);
    }

    /// Copies the arena to `self.ours`, after interpretation.
    pub fn interpreted_ran(&mut self) {
        World::read_data(&mut self.ours.data);
    }

    /// Interprets from `start` until the state equals the one in `self.native`. If it never does,
    /// returns the differences at the pc to which the fragment left, where there were fewest.
    pub fn search(&mut self, start: &State) -> Result<usize, Vec<String>> {
        self.begin(start);
        let wanted = self.native.registers();
        let mut nearest: Option<Vec<String>> = None;
        let mut stopped = None;
        for step in 0..SEARCH {
            if self.ours.context.rip == wanted.rip {
                World::read_data(&mut self.ours.data);
                let differences = self.native.differences(&self.ours);
                if differences.is_empty() {
                    return Ok(step);
                }
                if nearest.as_ref().is_none_or(|n| n.len() > differences.len()) {
                    nearest = Some(differences);
                }
            }
            if stopped.is_some() {
                break;
            }
            stopped = self.interpret();
        }
        let nowhere = || {
            vec![format!(
                "the interpreter never comes to {:#x}, it ends with {stopped:?}",
                wanted.rip
            )]
        };
        Err(nearest.unwrap_or_else(nowhere))
    }
}
