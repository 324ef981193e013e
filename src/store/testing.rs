//! Support for tests: the order of steps on the disk, and databases that are slow to open or
//! refused by the system.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

type Steps = Arc<Mutex<Vec<&'static str>>>;

thread_local! {
    static STEPS: RefCell<Steps> = RefCell::default();
}

/// Wraps a closure for another thread. Its steps are recorded as those of this thread.
pub(super) fn with_my_steps<T>(run: impl FnOnce() -> T + Send) -> impl FnOnce() -> T + Send {
    let steps = STEPS.with_borrow(Clone::clone);
    move || {
        STEPS.set(steps);
        run()
    }
}

/// Until it is dropped, the steps of this thread are not recorded.
pub(super) struct WithoutSteps(Steps);

pub(super) fn without_steps() -> WithoutSteps {
    WithoutSteps(STEPS.replace(Steps::default()))
}

impl Drop for WithoutSteps {
    fn drop(&mut self) {
        STEPS.set(Arc::clone(&self.0));
    }
}

/// Records a step whose order matters.
pub(super) fn note(step: &'static str) {
    STEPS.with_borrow(|steps| steps.lock().unwrap().push(step));
}

/// The steps of this thread, and of those that run for it, since the last call.
pub(super) fn take_steps() -> Vec<&'static str> {
    STEPS.with_borrow(|steps| std::mem::take(&mut *steps.lock().unwrap()))
}

/// Databases that open when a test lets them, or that the system refuses to open.
pub(super) mod slow {
    use crate::store::StoreError;
    use std::collections::BTreeMap;
    use std::io;
    use std::path::{Path, PathBuf};
    use std::sync::{Condvar, Mutex};

    /// The result of the next opening.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Plan {
        Waits,
        Fails { errno: i32, times: u32 },
    }

    static PLANS: Mutex<BTreeMap<PathBuf, Plan>> = Mutex::new(BTreeMap::new());
    static CHANGED: Condvar = Condvar::new();

    /// Lets the database open when it is dropped.
    #[derive(Debug)]
    pub(in crate::store) struct Held(PathBuf);

    impl Drop for Held {
        fn drop(&mut self) {
            PLANS.lock().unwrap().remove(&self.0);
            CHANGED.notify_all();
        }
    }

    /// Blocks the opening of the database in this directory.
    pub(in crate::store) fn hold(dir: &Path) -> Held {
        plan(dir, Plan::Waits)
    }

    /// Makes the next openings of the database in this directory fail with this error.
    pub(in crate::store) fn refuse(dir: &Path, errno: i32, times: u32) -> Held {
        plan(dir, Plan::Fails { errno, times })
    }

    fn plan(dir: &Path, plan: Plan) -> Held {
        PLANS.lock().unwrap().insert(dir.to_owned(), plan);
        Held(dir.to_owned())
    }

    pub(in crate::store) fn is_held(dir: &Path) -> bool {
        PLANS.lock().unwrap().get(dir) == Some(&Plan::Waits)
    }

    pub(in crate::store) fn pass(dir: &Path) -> Result<(), StoreError> {
        let mut plans = CHANGED
            .wait_while(PLANS.lock().unwrap(), |plans| plans.get(dir) == Some(&Plan::Waits))
            .unwrap();
        match plans.get_mut(dir) {
            Some(Plan::Fails { errno, times }) if *times > 0 => {
                *times -= 1;
                Err(StoreError::io("open", dir)(io::Error::from_raw_os_error(*errno)))
            }
            _ => Ok(()),
        }
    }
}
