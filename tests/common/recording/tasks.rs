//! Tasks of a part of a test, and their end.

use std::thread::JoinHandle;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// A thread that runs tasks. All tasks and connections on it end with it.
#[derive(Debug)]
pub(crate) struct Loop {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Loop {
    pub(crate) fn start() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            // It ends when its sender is dropped.
            drop(runtime.block_on(stopped));
        });
        Loop { handle, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn run<T>(&self, task: impl Future<Output = T>) -> T {
        self.handle.block_on(task)
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.handle.spawn(task));
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        drop(self.stop.take());
        drop(self.thread.take().map(JoinHandle::join));
    }
}
