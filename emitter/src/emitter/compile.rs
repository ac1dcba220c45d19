//! The emitter's side of code generation: requests, which tell [`codegen`] about the emitter.
//!
//! A thread that compiles a trace asks for a [`Request`] under the lock, compiles without it, and
//! comes back with the code ([`Emitter::place`]). Resolved stubs, which are a few moves, are
//! compiled and placed at once by [`Emitter::compile_at`].
//!
//! Data: none of its own. Invariant: a request is a copy, so code generation reads nothing of the
//! emitter. It is good for one epoch. The caller holds the emitter.
//!
//! Example: [`Emitter::request`] for a side trace of exit 7 copies the record of exit 7, the number
//! of spill slots in use, and the processor's features. The fragment of exit 7 may be dropped while
//! the thread compiles; [`Emitter::place`] then answers [`EmitError::Stale`].

use crate::codegen::exit_entry::EntryPlaces;
use crate::codegen::mach::SiteKind;
use crate::codegen::{self, Entry, ExitState, Host, Request};
use crate::emitter::{EmitError, Emitter, EntryState};
use crate::fragment::{ExitId, Fragment, FragmentId};
use crate::record::Record;
use crate::transfers::indirect::{Source, Via};
use dynasour_ir::Version;

impl Emitter {
    /// The request with which code generation compiles a version of the region at `region`. Good
    /// until everything is dropped.
    ///
    /// # Errors
    /// There is no such exit of a guard.
    pub fn request(&self, region: u64, entry: EntryState) -> Result<Request, EmitError> {
        let entry = match entry {
            EntryState::Canonical => Entry::Canonical,
            EntryState::FromExit(exit) => {
                let (fragment, record) = self.warm_record(exit)?;
                Entry::FromExit(Box::new(ExitState {
                    record: record.clone(),
                    touched: fragment.touched,
                    end_of_slots: fragment.end_of_slots,
                    extended_live: fragment.extended_live,
                }))
            }
        };
        Ok(Request { host: self.host(region), entry, epoch: self.epoch })
    }

    fn host(&self, region: u64) -> Host {
        Host {
            cpu: self.cpu,
            tail: self.indirect.tail(Source::Stored),
            checked: self.indirect.checked_entry(region, Via::Memory),
            counts: self.counting.is_some(),
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

    /// The fragment and record of a guard's exit.
    pub(crate) fn warm_record(&self, exit: ExitId) -> Result<(&Fragment, &Record), EmitError> {
        let e = self.exit(exit).filter(|e| e.kind == SiteKind::Guard).ok_or(EmitError::Unknown)?;
        let fragment = self.fragment(e.fragment).ok_or(EmitError::Unknown)?;
        let record =
            e.record.and_then(|r| fragment.records.get(r as usize)).ok_or(EmitError::Unknown)?;
        Ok((fragment, record))
    }

    /// Compiles and places a version that is entered in the state `entry`; `live` says that the
    /// extended state is loaded then.
    pub(crate) fn compile_at(
        &mut self,
        version: &Version,
        entry: &EntryPlaces,
        live: bool,
    ) -> Result<FragmentId, EmitError> {
        let host = self.host(version.region);
        let code = codegen::generate(version, entry, live, &host, &mut self.allocator)?;
        self.publish(code)
    }
}
