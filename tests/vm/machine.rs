//! A PC that QEMU emulates in software, with PCI Express slots and disks.
//!
//! All files and sockets of QEMU have no name: they end with this process. So does QEMU, also if
//! this process is killed.

use crate::guest::{Answer, Request};
use crate::hardware::{Clock, DISKS, FIRST, NAMESPACES, command};
use crate::image;
use crate::real::sandbox::output;
use crate::real::say;
use crate::{SOON, kernel_package};
use command_fds::{CommandFdExt as _, FdMapping};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// A limit against hanging, in seconds of the guest's clock.
const GUEST_LIMIT: f64 = 300.0;

/// A machine that runs.
#[derive(Debug)]
pub(crate) struct Machine {
    clock: Clock,
    initrd: File,
    disks: Vec<(&'static str, File)>,
    running: RefCell<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    qemu: Child,
    console: File,
    agent: BufReader<UnixStream>,
    monitor: BufReader<UnixStream>,
    /// Events of QEMU that were read while an answer was awaited.
    events: Vec<Value>,
}

impl Machine {
    /// Makes its files, and boots it.
    pub(crate) fn start(clock: Clock) -> Self {
        let mut disks = Vec::new();
        for (name, size, make) in DISKS {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(size << 20).unwrap();
            output(Command::new(make[0]).args(&make[1..]).arg(file.path()));
            disks.push((name, file.into_file()));
        }
        for name in NAMESPACES {
            let file = tempfile::tempfile().unwrap();
            file.set_len(16 << 20).unwrap();
            disks.push((name, file));
        }
        let initrd = image::initrd(&kernel_package().unwrap());
        let machine = Machine { clock, initrd, disks, running: RefCell::default() };
        machine.boot();
        machine
    }

    /// Switches it on, and waits until the agent serves.
    pub(crate) fn boot(&self) {
        let began = Instant::now();
        let (agent, agents_end) = UnixStream::pair().unwrap();
        let (monitor, monitors_end) = UnixStream::pair().unwrap();
        for stream in [&agent, &monitor] {
            stream.set_read_timeout(Some(SOON)).unwrap();
        }
        let console = tempfile::tempfile().unwrap();
        let mut passed: Vec<OwnedFd> = vec![
            agents_end.into(),
            monitors_end.into(),
            console.try_clone().unwrap().into(),
            self.initrd.try_clone().unwrap().into(),
        ];
        passed.extend(self.disks.iter().map(|(_, file)| file.try_clone().unwrap().into()));
        let mut command = command(&self.disks, self.clock);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mappings = (FIRST..).zip(passed);
        let mappings = mappings.map(|(child_fd, parent_fd)| FdMapping { parent_fd, child_fd });
        command.fd_mappings(mappings.collect()).unwrap();
        let mut running = Running {
            qemu: spawn(command),
            console,
            agent: BufReader::new(agent),
            monitor: BufReader::new(monitor),
            events: Vec::new(),
        };
        // QEMU greets, and waits for this.
        running.monitor.read_line(&mut String::new()).unwrap();
        running.order("qmp_capabilities", &json!({}));
        match running.answer() {
            Some(Answer::Ready) => {}
            other => panic!("the agent is not ready: {other:?}\n{}", running.tail()),
        }
        self.running.replace(Some(running));
        say(format_args!("booted within {:.1?}", began.elapsed()));
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// Sends a request to the agent. `None` if the guest does not answer.
    fn try_ask(&self, request: &Request) -> Option<Answer> {
        let mut running = self.running.borrow_mut();
        let running = running.as_mut()?;
        let line = serde_json::to_string(request).unwrap() + "\n";
        running.agent.get_mut().write_all(line.as_bytes()).ok()?;
        running.answer()
    }

    /// Sends a request to the agent.
    pub(crate) fn ask(&self, request: &Request) -> Answer {
        self.try_ask(request).unwrap_or_else(|| {
            let console = self.running.borrow_mut().as_mut().map(Running::tail);
            panic!("the guest does not answer {request:?}:\n{}", console.unwrap_or_default())
        })
    }

    /// Runs a script in the guest: its exit code, output and errors.
    pub(crate) fn try_run(&self, script: &str) -> (Option<i32>, String, String) {
        match self.ask(&Request::Run(script.to_owned())) {
            Answer::Ran { code, output, errors } => (code, output.trim_end().to_owned(), errors),
            other => panic!("{script}: {other:?}"),
        }
    }

    /// The output of a script, for the report of a test that has failed.
    pub(crate) fn report(&self, script: &str) -> String {
        match self.try_ask(&Request::Run(script.to_owned())) {
            Some(Answer::Ran { output, errors, .. }) => output + &errors,
            other => format!("{other:?}"),
        }
    }

    /// Runs a script in the guest that must succeed, and returns its output.
    pub(crate) fn run(&self, script: &str) -> String {
        let (code, output, errors) = self.try_run(script);
        assert_eq!(code, Some(0), "{script}: {output}\n{errors}");
        output
    }

    pub(crate) fn boot_id(&self) -> String {
        self.run("cat /proc/sys/kernel/random/boot_id")
    }

    /// The time since the boot, in seconds of the guest's clock.
    pub(crate) fn uptime(&self) -> f64 {
        self.run("cut -d ' ' -f 1 /proc/uptime").parse().unwrap()
    }

    /// Repeats `read` until it returns a value. Between two tries the guest has nothing to do, so
    /// its clock leaps to its next event.
    pub(crate) fn wait<T>(&self, what: &str, mut read: impl FnMut() -> Option<T>) -> T {
        let (mut waited, mut pause) = (0.0, 0.1);
        loop {
            if let Some(value) = read() {
                return value;
            }
            assert!(waited < GUEST_LIMIT, "{what}: not within {waited:.0} s of the guest");
            self.run(&format!("sleep {pause}"));
            waited += pause;
            pause = f64::min(pause * 1.5, 4.0);
        }
    }

    /// Has the agent do `work`, which it reports without an end, and cuts the power right after a
    /// report for which `is_last` is true. Returns all reports that came out of the machine.
    pub(crate) fn cut_power_during(
        &self,
        work: &Request,
        mut is_last: impl FnMut(&Answer) -> bool,
    ) -> Vec<Answer> {
        assert!(matches!(self.ask(work), Answer::Done));
        let mut running = self.running.take().unwrap();
        let (mut reports, mut is_cut) = (Vec::new(), false);
        while let Some(report) = running.answer() {
            if !is_cut && is_last(&report) {
                is_cut = true;
                running.qemu.kill().unwrap();
            }
            reports.push(report);
        }
        assert!(is_cut, "the guest ended:\n{}", running.tail());
        reports
    }

    /// Reboots it as the end of a clean shutdown does.
    pub(crate) fn reboot(&self) {
        let answer = self.try_ask(&Request::Run("sync; reboot -f".to_owned()));
        assert!(answer.is_none(), "{answer:?}");
        // QEMU ends where a machine would start again.
        let mut running = self.running.take().unwrap();
        assert!(running.qemu.wait().unwrap().success(), "{}", running.tail());
        self.boot();
    }

    /// Sends a command to QEMU.
    fn order(&self, command: &str, arguments: &Value) {
        self.running.borrow_mut().as_mut().unwrap().order(command, arguments);
    }

    /// Plugs a device into a slot.
    pub(crate) fn plug(&self, device: &Value) {
        self.order("device_add", device);
    }

    /// Requests the removal of a device, as by the button of its slot, and waits until QEMU has
    /// removed it.
    pub(crate) fn unplug(&self, device: &str) {
        let mut running = self.running.borrow_mut();
        let running = running.as_mut().unwrap();
        running.order("device_del", &json!({"id": device}));
        let is_end =
            |event: &Value| event["event"] == "DEVICE_DELETED" && event["data"]["device"] == device;
        while !running.events.iter().any(is_end) {
            let event = running.read_monitor();
            running.events.push(event);
        }
        running.events.retain(|event| !is_end(event));
    }

    /// Limits a disk, with this limit of QEMU for each second of the host's clock; 0 ends it.
    pub(crate) fn throttle(&self, disk: &str, limit: &str, value: u64) {
        let mut limits = json!({"id": format!("/machine/peripheral/disk-{disk}/virtio-backend")});
        for key in ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"] {
            limits[key] = json!(if key == limit { value } else { 0 });
        }
        self.order("block_set_io_throttle", &limits);
    }

    /// The address of the function in a slot, once the kernel has it.
    pub(crate) fn address_in(&self, slot: u8) -> String {
        self.wait(&format!("a function in slot {slot}"), || {
            let dir = format!("/sys/bus/pci/devices/0000:00:{slot:02x}.0");
            let (_, found, _) = self.try_run(&format!("cd {dir} && ls -d 0000:*:00.0"));
            (!found.is_empty()).then_some(found)
        })
    }
}

impl Running {
    /// The next answer of the agent; `None` when the guest has ended, or hangs.
    fn answer(&mut self) -> Option<Answer> {
        let mut line = String::new();
        self.agent.read_line(&mut line).ok()?;
        line.ends_with('\n').then(|| serde_json::from_str(&line).unwrap())
    }

    fn order(&mut self, command: &str, arguments: &Value) {
        let line = json!({"execute": command, "arguments": arguments}).to_string() + "\n";
        self.monitor.get_mut().write_all(line.as_bytes()).unwrap();
        loop {
            let answer = self.read_monitor();
            if answer.get("event").is_some() {
                self.events.push(answer);
            } else {
                assert!(answer.get("error").is_none(), "{command} {arguments}: {answer}");
                return;
            }
        }
    }

    fn read_monitor(&mut self) -> Value {
        let mut line = String::new();
        match self.monitor.read_line(&mut line) {
            Ok(_) if line.ends_with('\n') => serde_json::from_str(&line).unwrap(),
            other => panic!("QEMU does not answer ({other:?}):\n{}", self.tail()),
        }
    }

    fn tail(&mut self) -> String {
        let mut text = Vec::new();
        self.console.seek(SeekFrom::Start(0)).unwrap();
        self.console.read_to_end(&mut text).unwrap();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.qemu.kill());
        drop(self.qemu.wait());
    }
}

/// Starts QEMU in a thread that does not end before this process: its end would end QEMU.
fn spawn(mut command: Command) -> Child {
    let (sender, spawned) = mpsc::channel();
    thread::spawn(move || {
        sender.send(command.spawn().unwrap()).unwrap();
        drop(command);
        loop {
            thread::park();
        }
    });
    spawned.recv().unwrap()
}
