//! The emitter's side of code generation: requests, which tell [`codegen`] about the emitter.
//!
//! A thread that compiles a trace asks for a [`Request`] under the lock, compiles without it, and
//! comes back with the code ([`Emitter::place`]). For a resolved stub it is a [`StubRequest`], and
//! [`Emitter::lead_exit`].
//!
//! Data: none of its own. Invariant: a request is a copy, so code generation reads nothing of the
//! emitter. It is good for one epoch. The caller holds the emitter.
//!
//! Example: [`Emitter::request`] for a side trace of exit 7 copies the record of exit 7, the number
//! of spill slots in use, and the processor's features. The fragment of exit 7 may be dropped while
//! the thread compiles; [`Emitter::place`] then answers [`EmitError::Stale`].

use crate::codegen::lifted::{self, LiftedCode};
use crate::codegen::mach::SiteKind;
use crate::codegen::{
    self, Allocator, CodegenError, CompiledCode, ExitState, FragmentEntry, Host, Request,
};
use crate::emitter::{EmitError, Emitter, EntryState};
use crate::fragment::{ExitId, Fragment, FragmentId};
use crate::record::Record;
use crate::transfers::indirect::{TargetSource, Via};
use dynasour_ir::predict::{NativeResults, Registers};
use dynasour_ir::validate::{Disagreement, Limits, Start, Subject, validate_code};
use dynasour_ir::{Context, Version};
use std::collections::BTreeMap;

/// Where a resolved stub leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StubTarget {
    /// To this fragment, the canonical one of the exit's target.
    Fragment(FragmentId),
    /// To this fragment if the exit's target, which is computed, is its pc. Otherwise the stub
    /// leaves by a guard of its own, in the exit's state.
    FragmentIf(FragmentId),
    /// To the tables of indirect transfers: the target is computed.
    Tables,
    /// Where links to the exit's target lead, now and later.
    Place,
    /// To the block of the exit's target, which has been copied.
    Block,
    /// As `Block`, after a counter that leaves to the runtime after this many executions.
    CountedBlock(u64),
}

/// What code generation needs for a resolved stub; made by [`Emitter::stub_request`].
#[derive(Debug)]
pub struct StubRequest {
    exit: ExitId,
    to: StubTarget,
    /// The pc that the stub is named by, and the one that its target is compared with.
    pc: u64,
    only: Option<u64>,
    state: ExitState,
    host: Host,
    epoch: u64,
}

/// A resolved stub that has been compiled and not placed; see [`Emitter::lead_exit`].
pub struct CompiledStub {
    pub(crate) exit: ExitId,
    pub(crate) to: StubTarget,
    pub(crate) epoch: u64,
    pub(crate) code: CompiledCode,
}

impl StubRequest {
    /// The exit that the stub is for.
    pub fn exit(&self) -> ExitId {
        self.exit
    }

    /// Where the stub leads.
    pub fn target(&self) -> StubTarget {
        self.to
    }

    /// Compiles the stub. Needs nothing of the emitter.
    ///
    /// # Errors
    /// Its stores may need a register too many.
    pub fn compile(&self, allocator: &mut Allocator) -> Result<CompiledStub, CodegenError> {
        let &StubRequest { exit, to, pc, only, ref state, ref host, epoch } = self;
        let code = codegen::compile_stub(pc, only, state, host, allocator)?;
        Ok(CompiledStub { exit, to, epoch, code })
    }

    /// Compares the compiled stub with the record of its exit, on some states.
    ///
    /// # Errors
    /// It does not do what the record says.
    pub fn verify(&self, stub: &CompiledStub) -> Result<(), Box<Disagreement>> {
        let version = lifted::untouched(self.pc);
        let mut code = LiftedCode::of_stub(&stub.code, &version, &self.state.record);
        let subject = Subject {
            // No guest instruction belongs to it.
            code: &mut BTreeMap::new(),
            built: &version,
            optimised: &version,
            entry: Registers { gpr: ENTRY, rflags: 0, segments: [0x7000, 0x8000] },
            results: &NativeResults::default(),
            // All memory is accessible, so that the stores of the record are performed.
            read: &|address, _| Some(address.swap_bytes()),
            constants: &[],
            length: 0,
            start: &Start::default(),
        };
        validate_code(subject, &mut code, Limits { cases: STATES, ..Limits::default() }).map(drop)
    }
}

/// States on which a stub is compared.
const STATES: u64 = 16;

/// Registers that differ from each other, with addresses that do not overlap.
const ENTRY: [u64; 16] = {
    let mut registers = [0; 16];
    let mut i = 0;
    while i < 16 {
        registers[i] = 0x1122_3344_0000 + 0x1_0203_0000 * i as u64;
        i += 1;
    }
    registers
};

impl Emitter {
    /// The request with which code generation compiles a version of the region at `region`. Good
    /// until everything is dropped.
    ///
    /// # Errors
    /// There is no such exit of a guard.
    pub fn request(&self, region: u64, entry: EntryState) -> Result<Request, EmitError> {
        let entry = match entry {
            EntryState::Canonical => FragmentEntry::Canonical,
            EntryState::FromExit(exit) => FragmentEntry::FromExit(Box::new(self.exit_state(exit)?)),
        };
        Ok(Request { host: self.host(region), entry, epoch: self.epoch })
    }

    /// What holds of the guest's registers when a fragment has been left through this exit.
    pub fn known_at(&self, exit: ExitId) -> Option<&Context> {
        let exit = self.exit(exit)?;
        self.fragment(exit.fragment)?.contexts.exits.get(exit.anchor.index())
    }

    /// A copy of what is known of the state that a guard's exit leaves in.
    fn exit_state(&self, exit: ExitId) -> Result<ExitState, EmitError> {
        let (fragment, record) = self.warm_record(exit)?;
        Ok(ExitState {
            record: record.clone(),
            known: self.known_at(exit).cloned().unwrap_or_default(),
            touched: fragment.touched,
            end_of_slots: fragment.end_of_slots,
            extended_live: fragment.extended_live,
        })
    }

    fn host(&self, region: u64) -> Host {
        Host {
            cpu: self.cpu,
            tail: self.indirect.tail(TargetSource::Stored),
            checked: self.indirect.checked_entry(region, Via::Memory),
            counts: self.counting.is_some(),
            is_watched: self.is_watched(),
            starts: None,
            names_transfers: self.indirect.names_transfers(),
        }
    }

    /// Compiles and places at once. [`EmitError::is_full`] asks the caller to
    /// [`Emitter::flush_all`] and try again.
    ///
    /// # Errors
    /// The version cannot be compiled, or there is no room.
    pub fn compile(
        &mut self,
        version: &Version,
        entry: EntryState,
    ) -> Result<FragmentId, EmitError> {
        let request = self.request(version.region, entry)?;
        let code = codegen::compile(version, &request, &mut self.allocator)?;
        self.place(&request, code)
    }

    /// The request for a resolved stub that leads a guard's exit to `to`. Good until everything is
    /// dropped.
    ///
    /// # Errors
    /// There is no such exit of a guard, or its target is computed where `to` wants a pc, or the
    /// other way round, or there is no such fragment.
    pub fn stub_request(&self, exit: ExitId, to: StubTarget) -> Result<StubRequest, EmitError> {
        let e = self.exit(exit).ok_or(EmitError::Unknown)?;
        let pc_of = |fragment| self.fragment(fragment).map(|f| f.pc).ok_or(EmitError::Unknown);
        let (pc, only) = match (to, e.target) {
            (StubTarget::FragmentIf(target), None) => (pc_of(target)?, Some(pc_of(target)?)),
            (StubTarget::Tables, None) => (pc_of(e.fragment)?, None),
            (StubTarget::Fragment(target), Some(pc)) if pc_of(target)? == pc => (pc, None),
            (StubTarget::Place | StubTarget::Block | StubTarget::CountedBlock(_), Some(pc)) => {
                (pc, None)
            }
            _ => return Err(EmitError::Unknown),
        };
        let (state, host) = (self.exit_state(exit)?, self.host(pc));
        Ok(StubRequest { exit, to, pc, only, state, host, epoch: self.epoch })
    }

    /// Compiles a resolved stub and leads the exit through it at once.
    ///
    /// # Errors
    /// As [`Emitter::stub_request`], [`StubRequest::compile`] and [`Emitter::lead_exit`].
    pub fn resolve_exit(&mut self, exit: ExitId, to: StubTarget) -> Result<FragmentId, EmitError> {
        let stub = self.stub_request(exit, to)?.compile(&mut self.allocator)?;
        self.lead_exit(stub)
    }

    /// The fragment and record of a guard's exit.
    pub(crate) fn warm_record(&self, exit: ExitId) -> Result<(&Fragment, &Record), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::Guard).ok_or(EmitError::Unknown)?;
        let fragment = self.fragment(e.fragment).ok_or(EmitError::Unknown)?;
        let record =
            e.record.and_then(|r| fragment.records.get(r as usize)).ok_or(EmitError::Unknown)?;
        Ok((fragment, record))
    }
}
