//! Fragments among guest code that runs in place: what leads there and back.
//!
//! Data: none of its own; [`Fragments::in_place`] says whether guest code runs in place. The caller
//! holds the lock of the fragments.
//!
//! Example: a trace leaves to 0x1080 for the first time, and comes to the runtime.
//! [`Fragments::leads_out`] makes the trace lead to the way out of 0x1080 from now on.

use super::Fragments;
use super::transitions::Arrival;
use dynasour_emitter::EmitError;
use dynasour_emitter::blocks::Copied;
use dynasour_guest::decode::Fetch;

impl Fragments {
    /// The code to which a patch at `pc` may jump that replaces the instructions up to `end`; none
    /// if there is no room or the instructions cannot be copied. Under `--chaos` it leads to the
    /// runtime, from which alone fragments are entered then.
    pub fn entrance(&mut self, pc: u64, end: u64, code: &dyn Fetch) -> Option<u64> {
        if !self.in_place || self.retired {
            return None;
        }
        let entrance = self.emitter.entrance(pc, end, code).ok()??;
        self.entrance_made(pc, entrance);
        Some(entrance)
    }

    /// The code to which a jump of the guest's to `pc` may be made to lead; as [`Self::entrance`].
    pub fn entrance_beside(&mut self, pc: u64, code: &dyn Fetch) -> Option<u64> {
        if !self.in_place || self.retired {
            return None;
        }
        let entrance = self.emitter.entrance_beside(pc, code).ok()??;
        self.entrance_made(pc, entrance);
        Some(entrance)
    }

    fn entrance_made(&mut self, pc: u64, entrance: u64) {
        // If there was a block at `pc`, the emitter has replaced it, and links to `pc` lead to the
        // new one.
        self.lead_to_first(pc);
        if let (Some(_), Some(block)) = (&self.chaos, self.emitter.block_at(entrance)) {
            self.emitter.unlink_block(block);
        }
        self.links_changed();
    }

    /// The guest goes on in place at `pc`, to which it came by `arrival`. If it came by a link or an
    /// indirect transfer, that leads there from now on.
    pub(super) fn leads_out(
        &mut self,
        pc: u64,
        code: &dyn Fetch,
        arrival: Arrival,
    ) -> Result<(), EmitError> {
        if self.retired || self.chaos.is_some() {
            return Ok(());
        }
        match arrival {
            Arrival::WithoutProgress | Arrival::Ordinary => return Ok(()),
            Arrival::Link => {
                self.emitter.copy(pc, code)?;
            }
            Arrival::Indirect(via) => {
                self.emitter.expect_indirect(pc, via);
                if matches!(self.emitter.copy(pc, code)?, Copied::Entry(_)) {
                    self.emitter.register_copy(pc, via)?;
                }
            }
            Arrival::End(exit) => {
                if matches!(self.emitter.copy(pc, code)?, Copied::Entry(_)) {
                    self.emitter.link_end(exit)?;
                    self.stats.links += 1;
                    self.tell_linked_to_place(exit);
                }
            }
        }
        self.links_changed();
        Ok(())
    }

    /// Guest code does not run in place any more. The caller has retired everything, and every
    /// thread has been outside since.
    pub fn stop_in_place(&mut self) {
        self.in_place = false;
        self.emitter.stop_in_place();
        self.clear();
    }
}
