use std::ops::Range;

use dynasour_guest::decode::{Moment, Watched};
use dynasour_guest::space::{self, Mapping, PAGE};
use nix::sys::mman::ProtFlags;

use super::pages::FLIPS;
use super::{Code, CodePages, News, Store};
use crate::memory::{self, FaultInfo, test_handler};

/// Notes what is dropped.
#[derive(Default)]
struct Notes(Vec<Range<u64>>);

impl Code for Notes {
    fn drop_code(&mut self, range: Range<u64>) {
        self.0.push(range);
    }
}

/// What a dispatcher does after a store has faulted: can it be repeated, and what was dropped
/// before?
fn opened(pages: &CodePages) -> Option<Vec<Range<u64>>> {
    let mut notes = Notes::default();
    match pages.announce_store(&memory::last_fault()) {
        Store::Refused => None,
        Store::Open => Some(Vec::new()),
        Store::Guarded(change) => {
            change.quiesce(&mut notes).perform(|| ()).0.publish(&mut notes, []);
            Some(notes.0)
        }
    }
}

const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const READ_WRITE_EXECUTE: i32 = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;

/// Two pages of the test's own.
fn map(prot: i32, flags: i32) -> Range<u64> {
    // SAFETY: a new mapping where the kernel likes.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), 2 * PAGE as usize, prot, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start as u64..start as u64 + 2 * PAGE
}

fn known(range: &Range<u64>) -> CodePages {
    let pages = CodePages::default();
    assert_eq!(pages.fetchable(range.start, 64), 64);
    pages
}

/// One byte, as the guest would store it.
fn store(address: u64) -> bool {
    // SAFETY: the page is the test's own.
    unsafe { memory::store(address, 1u8).is_ok() }
}

#[test]
fn a_guarded_page_is_opened_by_a_store_and_guarded_again() {
    test_handler::install();
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    assert!(pages.may_change(range.start..range.start + 8));
    assert_eq!(pages.watch(range.start..range.start + 8, pages.moment()), Watched::Now);
    assert_eq!(pages.watch(range.start..range.start + 8, pages.moment()), Watched::Already);
    // What was read before somebody guarded it may have been written to since.
    assert_eq!(pages.watch(range.start..range.start + 8, Moment::default()), Watched::Now);
    assert!(!pages.may_change(range.start..range.start + 8));
    assert!(store(range.start + PAGE));
    assert!(!store(range.start + 5));
    assert_eq!(
        opened(&pages).as_deref(),
        Some(std::slice::from_ref(&(range.start..range.start + PAGE)))
    );
    assert!(store(range.start + 5));
    // Another thread was faster.
    assert_eq!(opened(&pages), Some(Vec::new()));
    assert_eq!(
        pages.watch(range.start + PAGE - 4..range.start + PAGE + 4, pages.moment()),
        Watched::Now
    );
    assert!(!store(range.start + 5) && !store(range.start + PAGE));
    let mut notes = Notes::default();
    pages.announce([range.clone()]).quiesce(&mut notes).perform(|| ()).0.publish(&mut notes, []);
    assert!(store(range.start + 5) && store(range.start + PAGE));
    assert_eq!(notes.0, [range.clone(), range]);
}

#[test]
fn a_page_that_is_written_often_is_guarded_no_more() {
    test_handler::install();
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    for _ in 0..FLIPS {
        assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
        assert!(!store(range.start) && opened(&pages).is_some());
    }
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Impossible);
    assert_eq!(pages.watch(range.start + PAGE..range.end, pages.moment()), Watched::Now);
    // Until something else is mapped there.
    let all = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE | ProtFlags::PROT_EXEC;
    let change = pages.announce([range.clone()]).quiesce(&mut Notes::default());
    let news = News::Mapped(range.clone(), Some(Mapping::anonymous(all)));
    change.perform(|| ()).0.publish(&mut Notes::default(), [news]);
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
}

#[test]
fn what_cannot_be_guarded() {
    let constant = map(libc::PROT_READ | libc::PROT_EXEC, PRIVATE);
    assert_eq!(known(&constant).watch(constant.clone(), Moment::default()), Watched::Already);
    let shared = map(libc::PROT_READ | libc::PROT_EXEC, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    assert_eq!(known(&shared).watch(shared.clone(), Moment::default()), Watched::Impossible);
    let data = map(libc::PROT_READ | libc::PROT_WRITE, PRIVATE);
    assert_eq!(CodePages::default().fetchable(data.start, 64), 0);
}

#[test]
fn the_kernel_may_write_when_nothing_relies_on_the_guard() {
    test_handler::install();
    for threaded in [false, true] {
        let range = map(READ_WRITE_EXECUTE, PRIVATE);
        let pages = known(&range);
        if threaded {
            pages.set_threaded();
        }
        assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Now);
        let mut notes = Notes::default();
        assert!(pages.announces_outputs());
        let outputs =
            pages.announce_outputs(&mut notes, libc::SYS_read, &[0, range.start + 16, 32, 0, 0, 0]);
        assert_eq!(notes.0.as_slice(), std::slice::from_ref(&(range.start..range.start + PAGE)));
        assert!(store(range.start));
        assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Impossible);
        assert_eq!(pages.watch(range.start + PAGE..range.end, pages.moment()), Watched::Already);
        drop(outputs);
        assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
    }
}

/// What dropping code finds while a change is under way.
struct Watcher<'p> {
    pages: &'p CodePages,
    range: Range<u64>,
    dropped: u32,
}

impl Code for Watcher<'_> {
    fn drop_code(&mut self, range: Range<u64>) {
        assert_eq!(range, self.range);
        self.dropped += 1;
        if self.dropped == 1 {
            assert!(!store(range.start), "the guard stands until nothing relies on it");
            let watched = self.pages.watch(range.start..range.start + 1, self.pages.moment());
            assert_eq!(watched, Watched::Impossible, "but nothing new relies on it");
            assert!(
                self.pages.is_changing(&range)
                    && self.pages.may_change(range.start..range.start + 1)
            );
        } else {
            assert!(
                !self.pages.is_changing(&range),
                "what is made from now on relies on the new record"
            );
        }
    }
}

#[test]
fn a_change_of_mappings_goes_step_by_step() {
    test_handler::install();
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Now);
    let mut watcher = Watcher { pages: &pages, range: range.clone(), dropped: 0 };
    let quiet = pages.announce([range.clone()]).quiesce(&mut watcher);
    let (performed, ()) =
        quiet.perform(|| assert!(store(range.start), "the guards are given back"));
    let read_execute = ProtFlags::PROT_READ | ProtFlags::PROT_EXEC;
    performed.publish(&mut watcher, [News::Protected(range.clone(), read_execute)]);
    assert_eq!(watcher.dropped, 2);
    assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Already);
}

#[test]
fn an_abandoned_change_is_withdrawn() {
    let pages = CodePages::default();
    let range = 0x1000..0x3000;
    let announced = pages.announce([range.clone()]);
    assert!(pages.is_changing(&(0x2fff..0x3001)) && !pages.is_changing(&(0x3000..0x4000)));
    drop(announced);
    assert!(!pages.is_changing(&(0..u64::MAX)));
    // The exclusive right is free again.
    pages.changed(&mut Notes::default(), [range]);
    assert!(!pages.is_changing(&(0..u64::MAX)));
}

/// A store of the host's own, which may hold locks and cannot wait for other threads.
#[test]
fn the_hosts_stores_do_not_open_pages_that_other_threads_execute() {
    test_handler::install();
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
    assert!(!store(range.start + 3));
    pages.set_threaded();
    assert!(pages.write_guarded(&memory::last_fault(), range.start + 3, &[1, 2]));
    let mut bytes = [0; 3];
    assert_eq!(memory::copy_in(range.start + 3, &mut bytes), 3);
    assert_eq!(bytes, [1, 2, 0]);
    assert!(!store(range.start), "still guarded");
    assert!(pages.is_written());
    assert_eq!(
        pages.take_written().as_slice(),
        std::slice::from_ref(&(range.start..range.start + PAGE))
    );
    pages.dropped_written();
    assert!(!pages.is_written());
    let alone = known(&range);
    assert_eq!(alone.watch(range.start + PAGE..range.end, alone.moment()), Watched::Now);
    assert!(!store(range.start + PAGE));
    assert!(alone.write_guarded(&memory::last_fault(), range.start + PAGE, &[9]));
    assert!(store(range.start + PAGE) && alone.is_written());
}

#[test]
fn a_fault_at_a_page_of_which_nothing_is_known_is_not_the_guests() {
    test_handler::install();
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
    assert!(!store(range.start));
    let fault = memory::last_fault();
    // Another thread's call changes nothing there, but the record is forgotten.
    let change = pages.announce([range.clone()]).quiesce(&mut Notes::default());
    change.perform(|| ()).0.publish(&mut Notes::default(), [News::Unknown(range.clone())]);
    assert!(matches!(pages.announce_store(&fault), Store::Open));
}

#[test]
fn faults_of_the_guests_own_stay_its_own() {
    test_handler::install();
    let range = map(libc::PROT_READ | libc::PROT_EXEC, PRIVATE);
    let pages = known(&range);
    assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Already);
    assert!(!store(range.start));
    assert_eq!(opened(&pages), None);
    // A read is never ours.
    let fault = FaultInfo { error: 5, ..memory::last_fault() };
    assert!(matches!(pages.announce_store(&fault), Store::Refused));
}

/// Code in place is executed without being looked up, so nothing is known of its file when that is
/// opened for writing.
#[test]
fn code_of_a_file_is_found_before_it_is_looked_up() {
    let function = code_of_a_file_is_found_before_it_is_looked_up as *const () as u64;
    let own = space::maps().expect("maps").into_iter().find(|m| m.range.contains(&function));
    let inode = own.expect("own code").inode;
    let pages = CodePages::default();
    assert!(pages.has_code_of(inode) && !pages.has_code_of(u64::MAX));
    let elsewhere = map(libc::PROT_READ, PRIVATE);
    let unknown = |pages: &CodePages, news: News| {
        let change = pages.announce([elsewhere.clone()]).quiesce(&mut Notes::default());
        change.perform(|| ()).0.publish(&mut Notes::default(), [news]);
        pages.state().is_surveyed
    };
    assert!(unknown(&pages, News::Unmapped(elsewhere.clone())));
    let anonymous = Mapping::anonymous(ProtFlags::PROT_READ);
    assert!(unknown(&pages, News::Mapped(elsewhere.clone(), Some(anonymous))));
    assert!(!unknown(&pages, News::Mapped(elsewhere.clone(), None)));
    assert!(pages.has_code_of(inode) && pages.state().is_surveyed);
    assert!(!unknown(&pages, News::Protected(elsewhere.clone(), ProtFlags::PROT_EXEC)));
}

#[test]
fn a_file_that_may_change_takes_its_code_with_it() {
    let pages = CodePages::default();
    let function = a_file_that_may_change_takes_its_code_with_it as *const () as u64;
    assert_eq!(pages.fetchable(function, 8), 8);
    assert_eq!(pages.watch(function..function + 8, pages.moment()), Watched::Already);
    let own = space::maps()
        .expect("maps")
        .into_iter()
        .find(|m| m.range.contains(&function))
        .expect("own code");
    assert!(pages.file_may_change(own.inode).iter().any(|code| code.contains(&function)));
    assert!(pages.file_may_change(own.inode).is_empty());
    assert_eq!(pages.watch(function..function + 8, pages.moment()), Watched::Impossible);
}

#[test]
fn where_the_kernel_cannot_be_asked_what_is_known_stays_and_the_rest_may_be_anything() {
    let (code, data) = (map(READ_WRITE_EXECUTE, PRIVATE), map(libc::PROT_READ, PRIVATE));
    let status = crate::testing::in_child(|| {
        let pages = known(&code);
        let second = code.start + PAGE..code.end;
        let change = pages.announce([second.clone()]).quiesce(&mut Notes::default());
        let news = News::Unknown(second);
        change.perform(|| ()).0.publish(&mut Notes::default(), [news]);
        // No descriptors: as if there were no /proc.
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a limit of this child's.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
        assert_eq!(pages.fetchable(data.start, 16), 0);
        assert_eq!(pages.fetchable(code.start, 2 * PAGE as usize), 2 * PAGE as usize);
        assert_eq!(pages.watch(code.start..code.start + 8, pages.moment()), Watched::Now);
        assert!(!pages.may_change(code.start..code.start + 8));
        assert_eq!(
            pages.watch(code.start + PAGE - 4..code.start + PAGE + 4, pages.moment()),
            Watched::Impossible
        );
        assert!(pages.may_change(code.start + PAGE - 4..code.start + PAGE + 4));
        0
    });
    assert_eq!(status, 0);
}

#[test]
fn shared_memory_that_nothing_else_shows_changes_as_private_memory_does() {
    const SHARED: i32 = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let range = map(READ_WRITE_EXECUTE, SHARED);
    let first = range.start..range.start + 8;
    let pages = known(&range);
    assert_eq!(pages.watch(first.clone(), pages.moment()), Watched::Impossible);
    pages.own_shared(range.start);
    assert!(pages.owns_shared());
    assert_eq!(pages.watch(first.clone(), pages.moment()), Watched::Now);
    assert!(!store(range.start) && opened(&pages).is_some() && store(range.start));
    // Another piece stays another's.
    let other = map(READ_WRITE_EXECUTE, SHARED);
    assert_eq!(pages.fetchable(other.start, 8), 8);
    assert_eq!(pages.watch(other.start..other.start + 8, pages.moment()), Watched::Impossible);
    assert!(pages.disown(&other).is_empty());
    assert_eq!(pages.disown(&first), std::slice::from_ref(&range));
    assert_eq!(pages.watch(first.clone(), pages.moment()), Watched::Impossible);
    pages.own_shared(range.start);
    pages.own_shared(other.start);
    assert_eq!(pages.disown_all().len(), 2);
    assert!(!pages.owns_shared());
    // The process has forked.
    pages.own_shared(range.start);
    assert!(!pages.owns_shared());
    assert_eq!(pages.watch(first, pages.moment()), Watched::Impossible);
}

#[test]
fn owned_memory_whose_file_may_change_is_not_relied_on() {
    let range = map(READ_WRITE_EXECUTE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let pages = known(&range);
    pages.own_shared(range.start);
    let inode = pages.state().mappings.at(range.start).and_then(|m| m.file).expect("a file").inode;
    assert!(pages.owns_file(inode) && pages.is_shared(range.clone()));
    assert_eq!(pages.file_may_change(inode), std::slice::from_ref(&range));
    assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Impossible);
}
