use super::*;
use crate::memory::{self, test_handler};

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
    assert!(store(range.start + PAGE) && pages.take_written().is_empty());
    assert!(!store(range.start + 5));
    assert!(pages.opened_by_fault(&memory::last_fault()));
    assert!(store(range.start + 5));
    assert_eq!(pages.take_written().as_slice(), std::slice::from_ref(&(range.start..range.start + PAGE)));
    assert!(pages.take_written().is_empty());
    // Somebody else was faster.
    assert!(pages.opened_by_fault(&memory::last_fault()));
    assert_eq!(pages.watch(range.start + PAGE - 4..range.start + PAGE + 4, pages.moment()), Watched::Now);
    assert!(!store(range.start + 5) && !store(range.start + PAGE));
    assert!(pages.open(range.clone()));
    assert_eq!(pages.take_written().as_slice(), std::slice::from_ref(&range));
}

#[test]
fn a_page_that_is_written_often_is_guarded_no_more() {
    test_handler::install();
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    for _ in 0..FLIPS {
        assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
        assert!(!store(range.start) && pages.opened_by_fault(&memory::last_fault()));
    }
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Impossible);
    assert_eq!(pages.watch(range.start + PAGE..range.end, pages.moment()), Watched::Now);
    // Until something else is mapped there.
    let all = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE | ProtFlags::PROT_EXEC;
    pages.mapped(range.clone(), Some(Mapping::anonymous(all)));
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
fn the_kernel_is_not_kept_from_writing() {
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Now);
    let pinned = pages.pin(libc::SYS_read, &[0, range.start + 16, 32, 0, 0, 0]);
    assert_eq!(pages.take_written().as_slice(), std::slice::from_ref(&(range.start..range.start + PAGE)));
    assert!(pages.is_written() && store(range.start));
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Impossible);
    pages.unpin(&pinned);
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
}

/// Another thread may execute what was made from the page, and write to it: it is opened when nothing is left of that.
#[test]
fn with_several_threads_a_page_is_opened_for_the_kernel_when_nothing_relies_on_its_guard() {
    test_handler::install();
    let range = map(READ_WRITE_EXECUTE, PRIVATE);
    let pages = known(&range);
    pages.set_threaded();
    assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Now);
    let pinned = pages.pin(libc::SYS_read, &[0, range.start + 16, 32, 0, 0, 0]);
    let first = range.start..range.start + PAGE;
    assert_eq!(pages.guarded(&pinned)[0], first);
    assert!(!store(range.start), "it is guarded still");
    assert_eq!(
        pages.watch(range.start..range.start + 1, pages.moment()),
        Watched::Impossible,
        "but that does not last"
    );
    pages.open_dropped(first);
    assert!(store(range.start) && !pages.is_written() && pages.guarded(&pinned).is_empty());
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Impossible);
    assert_eq!(pages.watch(range.start + PAGE..range.end, pages.moment()), Watched::Already);
    pages.unpin(&pinned);
    assert_eq!(pages.watch(range.start..range.start + 1, pages.moment()), Watched::Now);
}

#[test]
fn faults_of_the_guests_own_stay_its_own() {
    test_handler::install();
    let range = map(libc::PROT_READ | libc::PROT_EXEC, PRIVATE);
    let pages = known(&range);
    assert_eq!(pages.watch(range.clone(), pages.moment()), Watched::Already);
    assert!(!store(range.start));
    assert!(!pages.opened_by_fault(&memory::last_fault()));
    // A read is never ours.
    let fault = FaultInfo { error: 5, ..memory::last_fault() };
    assert!(!pages.opened_by_fault(&fault));
}

#[test]
fn a_file_that_may_change_takes_its_code_with_it() {
    let pages = CodePages::default();
    let function = a_file_that_may_change_takes_its_code_with_it as *const () as u64;
    assert_eq!(pages.fetchable(function, 8), 8);
    assert_eq!(pages.watch(function..function + 8, pages.moment()), Watched::Already);
    let own = space::maps().expect("maps").into_iter().find(|m| m.range.contains(&function)).expect("own code");
    assert!(pages.file_may_change(own.inode).iter().any(|code| code.contains(&function)));
    assert!(pages.file_may_change(own.inode).is_empty());
    assert_eq!(pages.watch(function..function + 8, pages.moment()), Watched::Impossible);
}

#[test]
fn where_the_kernel_cannot_be_asked_what_is_known_stays_and_the_rest_may_be_anything() {
    let (code, data) = (map(READ_WRITE_EXECUTE, PRIVATE), map(libc::PROT_READ, PRIVATE));
    let status = crate::testing::in_child(|| {
        let pages = known(&code);
        pages.forget(code.start + PAGE..code.end);
        // No descriptors: as if there were no /proc.
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a limit of this child's.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
        assert_eq!(pages.fetchable(data.start, 16), 0);
        assert_eq!(pages.fetchable(code.start, 2 * PAGE as usize), 2 * PAGE as usize);
        assert_eq!(pages.watch(code.start..code.start + 8, pages.moment()), Watched::Now);
        assert!(!pages.may_change(code.start..code.start + 8));
        assert_eq!(pages.watch(code.start + PAGE - 4..code.start + PAGE + 4, pages.moment()), Watched::Impossible);
        assert!(pages.may_change(code.start + PAGE - 4..code.start + PAGE + 4));
        0
    });
    assert_eq!(status, 0);
}

#[test]
fn what_leaves_is_known_until_it_has_left() {
    let pages = CodePages::default();
    let [one, two] = [0x1000..0x3000, 0x2000..0x4000];
    pages.leaving(one.clone());
    pages.leaving(two.clone());
    assert!(pages.is_leaving(&(0x1fff..0x2001)) && !pages.is_leaving(&(0x4000..0x4001)));
    pages.left(&one);
    assert!(!pages.is_leaving(&(0x1000..0x2000)) && pages.is_leaving(&(0x2fff..0x3000)));
    pages.left(&two);
    assert!(!pages.is_leaving(&(0..u64::MAX)));
}
