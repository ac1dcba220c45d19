//! The report of a process at its end, or before it executes a program that is not translated:
//! statistics, the census of a counting run, a map for `perf`.
//!
//! Data: none of its own; it reads the [`Machine`](super::Machine) and takes its locks one after
//! another. Only the process that the user started reports
//! ([`System::report_to`](crate::kernel::process::System)). Called with all signals blocked, since
//! a failing write must not change how the guest ends.
//!
//! Example: `run --stats` prints the table of statistics to the descriptor for the report.

use super::Dispatcher;
use crate::kernel::process;
use crate::kernel::process::System;
use crate::observe::events;
use crate::observe::perf_map;
use crate::observe::stats::Stats;
use std::sync::atomic::Ordering;

impl Dispatcher {
    /// Writes the reports that the user asked for, if this is the process that the user started.
    pub(super) fn write_report(&mut self, system: &System) {
        if system.is_first() {
            events::statistics(|| self.statistics(system));
        }
        let Some(to) = system.report_to() else { return };
        let stats = self.statistics(system);
        let config = &self.machine.config;
        let mut text = String::new();
        if let Some(path) = &config.stats_json {
            let json = serde_json::to_string_pretty(&stats).expect("statistics are plain data");
            if let Err(error) = std::fs::write(path, json + "\n") {
                text = format!("dynasour: cannot write {}: {error}\n", path.display());
            }
        }
        if let Some(count) = &config.count
            && let Some(census) = self.machine.census()
        {
            let json = serde_json::to_vec(&census).expect("a census is plain data");
            if let Err(error) = std::fs::write(&count.file, json) {
                text.push_str(&format!(
                    "dynasour: cannot write {}: {error}\n",
                    count.file.display()
                ));
            }
        }
        if config.perf_map
            && let Some(Err(error)) =
                self.machine.fragments().and_then(|mut f| f.pieces().map(perf_map::write))
        {
            text.push_str(&format!(
                "dynasour: cannot write {}: {error}\n",
                perf_map::path().display()
            ));
        }
        if let Err(error) = self.machine.end_watch() {
            text.push_str(&format!("dynasour: {error}\n"));
        }
        if config.stats {
            text.push_str(&stats.table());
        }
        process::write_all(to, text.as_bytes());
    }

    fn statistics(&self, system: &System) -> Stats {
        self.publish_counts();
        let mut stats = self.machine.stats();
        stats.signals = system.delivered();
        stats
    }

    /// Copies the thread's own counts to its [`Peer`](super::peers::Peer), where all can read them.
    pub(super) fn publish_counts(&self) {
        self.peer.blocks.store(self.interp.block_count() as u64, Ordering::Relaxed);
        let given_up = self.selector.traces.heads.blacklisted(&*self.selector.traces.policy);
        self.peer.blacklisted.store(given_up as u64, Ordering::Relaxed);
    }
}
