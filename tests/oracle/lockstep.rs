//! Runs the interpreter and the processor in lockstep: one guest instruction at a time from the
//! same state.
//!
//! After each instruction all registers are compared, and the memory that the instruction writes by
//! its operands. To find other writes, the program's writable memory and its whole stack are
//! compared before each system call, every [`FULL_COMPARISON`] steps and at the end. Faults with
//! handlers are covered: the signal frames that the kernel and the runtime build must have the same
//! bytes.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ffi::CString;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dynasour_guest::ThreadContext;
use dynasour_guest::decode::{Decoded, Reader};
use dynasour_guest::image::{self, LoadOptions};
use dynasour_guest::space::{self, Brk};
use dynasour_ir::Trap;
use dynasour_runtime::interp::{self, GuestCode, Interp, Stop};
use dynasour_runtime::kernel::process::ThreadBody;
use dynasour_runtime::kernel::process::{Config, Engine, Inherited, Outcome, System};
use dynasour_runtime::kernel::signal::{FaultHooks, GuestFault};
use dynasour_runtime::memory;
use iced_x86::{Code, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, Register};

use crate::native::{Event, Native};
use crate::state::{Extended, Registers, number};

/// Steps between two comparisons of all writable memory (guess; fewer steps take longer, more find
/// a difference later).
const FULL_COMPARISON: u64 = 10_000;
const STACK_SIZE: u64 = 256 << 10;
/// Differing words that a report lists.
const MAX_WORDS: usize = 8;

/// Makes the same call as [`Native::start`], because signal frames show whether a process has ever
/// had an alternate stack.
fn disable_alternate_stack(system: &mut System, context: &mut ThreadContext) {
    let disabled =
        libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
    let registers = context.gpr;
    context.gpr[0] = libc::SYS_sigaltstack as u64;
    context.gpr[6] = 0;
    context.gpr[7] = &raw const disabled as u64;
    system.syscall(context, &mut NoEngine);
    assert_eq!(context.gpr[0], 0, "sigaltstack");
    context.gpr = registers;
}

/// System calls that both sides can make independently with the same result.
const SYSTEM_CALLS: [i64; 7] = [
    libc::SYS_write,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
];

/// How a comparison without differences ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The guest exited with this status, on both sides.
    Exited(i32),
    /// This signal ended the guest, on both sides.
    Killed(i32),
    /// The step limit was reached.
    Budget,
}

/// A comparison without differences.
pub struct Agreement {
    pub steps: u64,
    pub end: End,
    /// Encodings that were executed.
    pub codes: BTreeSet<Code>,
}

/// Both sides.
struct Lockstep {
    interp: Interp,
    context: Box<ThreadContext>,
    system: Box<System>,
    native: Native,
    /// Memory that the guest can write.
    writable: Vec<Range<u64>>,
    factory: InstructionInfoFactory,
    /// Buffer for the extended state that ptrace returns.
    area: Vec<u8>,
    codes: BTreeSet<Code>,
    steps: u64,
    disturb: Option<(u64, String)>,
}

/// Engine hooks for calls that these guests must not make or whose effects are not compared.
struct NoEngine;

impl dynasour_runtime::changes::Code for NoEngine {
    fn drop_code(&mut self, _: Range<u64>) {}
}

impl Engine for NoEngine {
    fn private_memory_lost(&mut self) {}
    fn faults_are_handled(&mut self) {}
    fn faults_are_served(&mut self) {}
    fn after_fork_child(&mut self, _context: &ThreadContext) {}
    fn report(&mut self, _: &System) {}
    fn run_vfork_child(&mut self, _: &mut ThreadContext, _: &mut System) -> ! {
        unreachable!("vfork is not among the system calls")
    }
    fn vfork_child_gone(&mut self) {}
    fn call_threads(&mut self) {}
    fn registers_of(&self, _: i32) -> Option<dynasour_runtime::kernel::process::Registers> {
        None
    }
    fn park(&self, _: i32) -> Option<i32> {
        None
    }
    fn is_parked(&self, _: i32) -> bool {
        false
    }
    fn unpark(&self, _: i32) {}
    fn new_thread(&mut self, _: &dyn Fn(Range<u64>)) -> Option<Box<dyn ThreadBody>> {
        None
    }
    fn with_locks(&mut self, f: &mut dyn FnMut()) {
        f();
    }
}

/// Loads `executable` into this process and runs it on both sides for at most `budget` steps. It
/// needs a process of its own, because the guest's memory and the fault handlers stay. `disturb`
/// gives the number of steps after which state is damaged on purpose, and which state.
///
/// # Errors
/// A report of the first difference, or the reason why nothing could be compared.
pub fn compare(
    executable: &Path,
    budget: u64,
    disturb: Option<(u64, String)>,
) -> Result<Agreement, String> {
    let mut lockstep = Lockstep::start(executable)?;
    lockstep.disturb = disturb;
    lockstep.run(budget)
}

fn setup(error: impl std::fmt::Display) -> String {
    format!("the comparison cannot be set up: {error}")
}

impl Lockstep {
    fn start(executable: &Path) -> Result<Lockstep, String> {
        let inherited = Inherited::record();
        let name = CString::new(executable.as_os_str().as_bytes()).map_err(setup)?;
        let options = LoadOptions {
            stack_size: Some(STACK_SIZE),
            random: Some([0x5a; 16]),
            ..Default::default()
        };
        let plan = image::check(executable).map_err(setup)?;
        if plan.linker_path().is_some() {
            return Err(setup("the guest is not static"));
        }
        let loaded = plan.load(std::slice::from_ref(&name), &[], &options).map_err(setup)?;
        let maps = space::maps().map_err(setup)?;
        let images = maps.iter().filter(|m| m.prot.contains(nix::sys::mman::ProtFlags::PROT_WRITE));
        let inside = |m: &&space::MapEntry| {
            loaded
                .images
                .iter()
                .any(|i| i.range.start <= m.range.start && m.range.end <= i.range.end)
        };
        let mut writable: Vec<_> = images.filter(inside).map(|m| m.range.clone()).collect();
        writable.push(loaded.stack.range.clone());

        let mut context = ThreadContext::new();
        context.rip = loaded.entry_pc;
        context.gpr[dynasour_ir::Gpr::RSP.number()] = loaded.places.stack_pointer;
        let native = Native::start(&context).map_err(setup)?;

        let config = Config::alone(name, Brk::new(0).map_err(setup)?);
        let mut system = Box::new(System::new(inherited, config));
        let hooks = FaultHooks {
            thunk: interp::thunk_fixup,
            fragment: |_| None,
            accepted: |_, _| None,
            cache_end: |_| None,
        };
        // SAFETY: context and system are boxed and live until this process, which runs one guest,
        // ends its comparison.
        unsafe { system.start(&mut context, hooks) }.map_err(setup)?;
        disable_alternate_stack(&mut system, &mut context);
        Ok(Lockstep {
            interp: Interp::new(),
            area: vec![0; context.xstate.0.len()],
            context,
            system,
            native,
            writable,
            factory: InstructionInfoFactory::new(),
            codes: BTreeSet::new(),
            steps: 0,
            disturb: None,
        })
    }

    fn run(&mut self, budget: u64) -> Result<Agreement, String> {
        let mut end = End::Budget;
        let start = Registers::interpreted(&self.context);
        let nothing = Instruction::default();
        let mut differences = self.compare_registers()?;
        differences.extend(self.compare_memory(&self.writable)?);
        if !differences.is_empty() {
            return Err(self.report(&start, &nothing, differences));
        }
        while self.steps < budget && end == End::Budget {
            let before = Registers::interpreted(&self.context);
            let inst = match Reader::new(&GuestCode).decode(before.rip) {
                Decoded::Inst(inst) => inst,
                _ => Instruction::default(),
            };
            let full =
                inst.mnemonic() == Mnemonic::Syscall || self.steps.is_multiple_of(FULL_COMPARISON);
            if full {
                let differences = self.compare_memory(&self.writable)?;
                if !differences.is_empty() {
                    let text =
                        "before this instruction; DYNASOUR_ORACLE_FULL=1 finds the one that did it";
                    return Err(self.report(
                        &before,
                        &inst,
                        [vec![text.to_owned()], differences].concat(),
                    ));
                }
            }
            let (native, interpreted) = self.step(&inst)?;
            self.steps += 1;
            if let Some((_, what)) = self.disturb.take_if(|(step, _)| *step == self.steps - 1) {
                self.spoil(&what);
            }
            self.codes.insert(inst.code());
            let mut differences = Vec::new();
            match (native, interpreted) {
                (Event::Exited(native), Outcome::Exit(ours)) if native == ours & 0xff => {
                    end = End::Exited(native)
                }
                (Event::Killed(native), Outcome::Killed(ours)) if native == ours => {
                    end = End::Killed(native)
                }
                (Event::Stepped, Outcome::Continue) => {
                    differences = self.compare_registers()?;
                    let written = if every_step_in_full() {
                        self.writable.clone()
                    } else {
                        self.written(&inst, &before)
                    };
                    differences.extend(self.compare_memory(&written)?);
                }
                (native, ours) => {
                    differences.push(format!("outcome: native {native:?}, interpreted {ours:?}"))
                }
            }
            if !differences.is_empty() {
                return Err(self.report(&before, &inst, differences));
            }
        }
        if end == End::Budget {
            let differences = self.compare_memory(&self.writable)?;
            if !differences.is_empty() {
                return Err(self.report(
                    &Registers::interpreted(&self.context),
                    &nothing,
                    differences,
                ));
            }
        }
        Ok(Agreement { steps: self.steps, end, codes: std::mem::take(&mut self.codes) })
    }

    /// Executes `inst` on both sides. If it raises a signal, goes on to the first instruction of
    /// the handler.
    fn step(&mut self, inst: &Instruction) -> Result<(Event, Outcome), String> {
        if inst.mnemonic() == Mnemonic::Syscall
            && !SYSTEM_CALLS.contains(&(self.context.gpr[0] as i64))
        {
            return Err(format!(
                "the guest makes system call {}, which has no place here",
                self.context.gpr[0]
            ));
        }
        let mut native = self.native.step(inst).map_err(setup)?;
        if let Event::Signal(signal) = native {
            native = self.native.deliver(signal).map_err(setup)?;
        }
        let context = &mut *self.context;
        let interpreted = match self.interp.run_one(context) {
            None => Outcome::Continue,
            Some(Stop::Syscall) => self.system.syscall(context, &mut NoEngine),
            Some(Stop::Special { pc }) => self.system.special(context, pc),
            Some(stop) => {
                let fault = fault(context, &stop)
                    .ok_or_else(|| format!("{inst} stops the interpreter: {stop:?}"))?;
                self.system.raise(context, fault)
            }
        };
        Ok((native, interpreted))
    }

    fn spoil(&mut self, what: &str) {
        match what {
            "register" => self.context.gpr[14] ^= 1,
            "flag" => self.context.rflags ^= 1,
            "vector" => {
                self.context.xstate.0[160] ^= 1;
                self.context.xstate.0[512] |= 2;
            }
            // SAFETY: the guest's own stack, far below the part in use.
            "stack" => unsafe {
                let address = self.context.gpr[4] - 4096;
                memory::store(address, 1u64).expect("the stack can be written");
            },
            _ => panic!("nothing is called {what}"),
        }
    }

    fn compare_registers(&mut self) -> Result<Vec<String>, String> {
        let native = Registers::native(&self.native.registers().map_err(setup)?);
        let mut out = native.differences(&Registers::interpreted(&self.context));
        let len = self.native.xstate(&mut self.area).map_err(setup)?;
        let native = Extended::from_area(&self.area[..len]);
        let ours = Extended::from_area(&self.context.xstate.0);
        if native != ours {
            out.extend(native.differences(&ours));
        }
        Ok(out)
    }

    /// The memory that `inst` writes when its registers are `before`.
    fn written(&mut self, inst: &Instruction, before: &Registers) -> Vec<Range<u64>> {
        let value = |register: Register| match register {
            Register::FS => Some(before.fs_base),
            Register::GS => Some(before.gs_base),
            r if r.is_segment_register() => Some(0),
            r if r.is_gpr() => {
                let full = before.gpr[r.full_register().number()];
                Some(if r.size() == 4 { full & 0xffff_ffff } else { full })
            }
            _ => None,
        };
        let mut out = Vec::new();
        for used in self.factory.info(inst).used_memory() {
            if matches!(
                used.access(),
                OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess | OpAccess::None
            ) {
                continue;
            }
            let Some(start) = used.virtual_address(0, |register, _, _| value(register)) else {
                continue;
            };
            let len = used.memory_size().size() as u64;
            out.push(start..start.wrapping_add(len));
        }
        if inst.is_string_instruction() {
            // The operand is the address of one iteration; rdi shows how far the others went.
            let (from, to) = (before.gpr[7], self.context.gpr[7]);
            out.push(from.min(to)..from.max(to));
        }
        out.retain(|range| {
            self.writable.iter().any(|w| w.start <= range.start && range.end <= w.end)
        });
        out
    }

    fn compare_memory(&self, ranges: &[Range<u64>]) -> Result<Vec<String>, String> {
        let mut out = Vec::new();
        for range in ranges {
            let len = (range.end - range.start) as usize;
            let (mut native, mut ours) = (vec![0; len], vec![0; len]);
            self.native.read(range.start, &mut native).map_err(setup)?;
            if memory::copy_in(range.start, &mut ours) != len {
                return Err(format!("memory at {range:x?} can no longer be read"));
            }
            if native == ours {
                continue;
            }
            for (index, (native, ours)) in native.chunks(8).zip(ours.chunks(8)).enumerate() {
                if native != ours && out.len() < MAX_WORDS {
                    let address = range.start + 8 * index as u64;
                    out.push(format!(
                        "[{address:#x}]: native {}, interpreted {}",
                        number(native),
                        number(ours)
                    ));
                }
            }
        }
        Ok(out)
    }

    fn report(&self, before: &Registers, inst: &Instruction, differences: Vec<String>) -> String {
        let mut bytes = vec![0; inst.len()];
        let read = memory::copy_in(before.rip, &mut bytes);
        format!(
            "step {} at {:#x}: {inst}  ({:02x?})\n  {}\nregisters before:\n{before}",
            self.steps,
            before.rip,
            &bytes[..read],
            differences.join("\n  ")
        )
    }
}

/// Compare all writable memory after every step?
fn every_step_in_full() -> bool {
    std::env::var_os("DYNASOUR_ORACLE_FULL").is_some()
}

/// The fault with which the interpreter stopped, as the dispatcher raises it.
fn fault(context: &mut ThreadContext, stop: &Stop<Infallible>) -> Option<GuestFault> {
    match *stop {
        Stop::Fault { pc, ref info } => Some(GuestFault::from_host_fault(context, pc, info)),
        Stop::Trap { pc, trap } => Some(match trap {
            Trap::Undefined => GuestFault::undefined(pc),
            Trap::Protection => GuestFault::protection(0),
            Trap::Breakpoint => {
                context.rip = pc + 1;
                GuestFault::breakpoint()
            }
            Trap::Fetch => GuestFault::fetch(pc, &memory::last_fault()),
        }),
        _ => None,
    }
}
