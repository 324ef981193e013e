//! The steps of a control daemon, on a thread of their own: the programs of NVIDIA's driver, in the
//! order of NVIDIA's plugin (`cmd/mps-control-daemon/mps/daemon.go`).

use super::machine::{Left, Outcome, Step};
use super::record::Record;
use crate::domain::{MpsSetup, ResourceName, printable};
use crate::hardware::{NvidiaPrograms, nvidia_programs};
use crate::host::{self, CommandError, Conduct, HostRoot, MpsPlace, Ran};
use std::collections::BTreeMap;
use std::io::PipeReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The limit of a question to the control daemon, which answers at once.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// The limit of `nvidia-smi`, which may wake up an idle GPU, and of the start.
const PROGRAM_MAX: Duration = Duration::from_secs(30);
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Makes the steps of all control daemons.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) host_root: HostRoot,
    pub(super) record: Record,
}

/// One step of one resource.
struct Work<'a> {
    programs: NvidiaPrograms,
    env: BTreeMap<String, String>,
    pipe: PathBuf,
    log: PathBuf,
    cancelled: &'a PipeReader,
}

impl Control {
    /// Makes a step. This thread must not be used for anything else afterwards.
    pub(super) fn make(
        &self,
        resource: &ResourceName,
        step: &Step,
        root: &str,
        cancelled: &PipeReader,
    ) -> Outcome {
        let programs = match nvidia_programs(&self.host_root) {
            Ok(Some(programs)) => programs,
            Ok(None) => {
                return Outcome::Unknown(
                    "nvidia-cuda-mps-control and nvidia-smi were not found in the usual folders of \
                     programs; install the driver's programs, or set `mps_control = \"external\"` \
                     if another program runs the control daemon"
                        .into(),
                );
            }
            Err(failure) => {
                return Outcome::Unknown(format!(
                    "the driver's programs cannot be found: {failure}"
                ));
            }
        };
        let folder = |name: &str| PathBuf::from(format!("{root}/{resource}/{name}"));
        let (pipe, log) = (folder("pipe"), folder("log"));
        let place = MpsPlace {
            mps_root: PathBuf::from(root),
            chroot: programs.root.clone(),
            launches: matches!(step, Step::BringUp(_)),
            is_live: self.host_root.is_live(),
        };
        if let Step::BringUp(setup) = step {
            // First: a process that dies in this step must not forget the compute mode.
            if let Err(error) = self.record.add(resource, &setup.root, &setup.gpus) {
                return Outcome::Failed(error);
            }
            if let Err(error) = host::make_mps_folders(&place, &pipe, &log) {
                return Outcome::Failed(error);
            }
        }
        if let Err(error) = host::enter_mps_place(&place) {
            return Outcome::Unknown(error);
        }
        let variable = |name: &str, path: &Path| (name.to_owned(), path.display().to_string());
        let env = BTreeMap::from([
            variable("CUDA_MPS_PIPE_DIRECTORY", &pipe),
            variable("CUDA_MPS_LOG_DIRECTORY", &log),
            ("PATH".to_owned(), PATH.to_owned()),
        ]);
        let work = Work { programs, env, pipe, log, cancelled };
        match step {
            Step::Look => work.look(),
            Step::BringUp(setup) => work.bring_up(setup),
            Step::Stop(left) => match work.stop(left) {
                Outcome::Stopped => match self.record.remove(resource) {
                    Ok(()) => Outcome::Stopped,
                    Err(error) => Outcome::Failed(error),
                },
                other => other,
            },
        }
    }
}

impl Work<'_> {
    /// The question of NVIDIA's plugin before it registers.
    fn look(&self) -> Outcome {
        match self.command("get_default_active_thread_percentage") {
            Ok(()) => Outcome::Ready,
            Err(outcome) => outcome,
        }
    }

    fn bring_up(&self, setup: &MpsSetup) -> Outcome {
        let found = self.look();
        if let Outcome::Unknown(_) = found {
            return found;
        }
        let (mut gpus, mut failed) = (Vec::new(), None);
        for gpu in &setup.gpus {
            match self.exclusive(gpu) {
                Ok(facts) => gpus.push(facts),
                // A control daemon that answers serves its GPUs, also one for which `nvidia-smi`
                // fails.
                Err(Outcome::Failed(why)) if found == Outcome::Ready => {
                    failed.get_or_insert(Outcome::Unknown(why));
                }
                Err(outcome) => return outcome,
            }
        }
        if found != Outcome::Ready
            && let Err(outcome) = self.launch()
        {
            // One that hangs: NVIDIA's program has refused to start a second one.
            return if let Outcome::Silent(_) = found { found } else { outcome };
        }
        for command in setup.limits(&gpus) {
            match self.command(&command) {
                Ok(()) => {}
                Err(Outcome::Absent(why)) => return Outcome::Failed(why),
                Err(other) => return other,
            }
        }
        match self.look() {
            Outcome::Absent(why) => Outcome::Failed(format!("it ended after its start: {why}")),
            Outcome::Ready => failed.unwrap_or(Outcome::Ready),
            other => other,
        }
    }

    /// Ends the control daemon, which waits for its clients, and puts back the compute mode.
    fn stop(&self, left: &Left) -> Outcome {
        match self.look() {
            Outcome::Ready => match self.command("quit") {
                Ok(()) => {}
                Err(Outcome::Silent(_)) => {
                    return Outcome::Failed("it waits for the end of its clients".into());
                }
                Err(other) => return other,
            },
            Outcome::Absent(_) => {}
            other => return other,
        }
        let put_back = left.gpus.iter().map(|gpu| self.smi(&["-i", gpu, "-c", "DEFAULT"]));
        // All are tried, also after a failure.
        let failed: Vec<Outcome> = put_back.filter_map(Result::err).collect();
        failed.into_iter().next().unwrap_or(Outcome::Stopped)
    }

    /// Only the server of MPS may use the GPU directly. Returns the GPU's number and its memory in
    /// MiB, which is unknown for a GPU without memory of its own.
    fn exclusive(&self, gpu: &str) -> Result<(u32, Option<u64>), Outcome> {
        const QUERY: &str = "--query-gpu=index,memory.total,compute_mode";
        let line = self.smi(&["-i", gpu, QUERY, "--format=csv,noheader,nounits"])?;
        let mut words = line.split(',').map(str::trim);
        let index = words.next().and_then(|index| index.parse().ok()).ok_or_else(|| {
            let answer = printable(&line).to_string();
            Outcome::Failed(format!("nvidia-smi has no number for the GPU {gpu}: `{answer}`"))
        })?;
        let memory = words.next().and_then(|total| total.parse().ok());
        if words.next() != Some("Exclusive_Process") {
            self.smi(&["-i", gpu, "-c", "EXCLUSIVE_PROCESS"])?;
        }
        Ok((index, memory))
    }

    fn launch(&self) -> Result<(), Outcome> {
        let argv = [self.programs.mps_control.display().to_string(), "-d".to_owned()];
        let conduct = Conduct { leaves_daemon: true, ..Conduct::default() };
        let ran = host::run_as(&argv, &self.env, conduct, PROGRAM_MAX, self.cancelled);
        ran.ended.map_err(|error| {
            let (pipe, log) = (self.pipe.display(), self.log.display());
            no_result(&error).unwrap_or_else(|| {
                Outcome::Failed(format!(
                    "`nvidia-cuda-mps-control -d` failed for {pipe}: {error}; {log}/control.log has \
                     the reason"
                ))
            })
        })
    }

    /// Sends one command to the control daemon.
    fn command(&self, command: &str) -> Result<(), Outcome> {
        let argv = [self.programs.mps_control.display().to_string()];
        let input = format!("{command}\n");
        let conduct = Conduct { input: &input, leaves_daemon: false };
        let Ran { ended, output } =
            host::run_as(&argv, &self.env, conduct, ANSWER_MAX, self.cancelled);
        ended.map_err(|error| {
            let pipe = self.pipe.display();
            let output = printable(&output).to_string();
            no_result(&error).unwrap_or_else(|| match error {
                CommandError::TooLong(limit) => Outcome::Silent(format!(
                    "the control daemon in {pipe} has not answered `{command}` within {}",
                    humantime::format_duration(limit)
                )),
                error => Outcome::Absent(format!(
                    "no control daemon accepts `{command}` in {pipe}: {error}{}",
                    if output.is_empty() { output } else { format!(" ({output})") }
                )),
            })
        })
    }

    fn smi(&self, arguments: &[&str]) -> Result<String, Outcome> {
        let program = [self.programs.smi.display().to_string()];
        let argv: Vec<String> =
            program.into_iter().chain(arguments.iter().map(|text| (*text).to_owned())).collect();
        let Ran { ended, output } =
            host::run_as(&argv, &self.env, Conduct::default(), PROGRAM_MAX, self.cancelled);
        match ended {
            Ok(()) => Ok(output),
            Err(error) => Err(no_result(&error).unwrap_or_else(|| {
                let (arguments, output) = (arguments.join(" "), printable(&output).to_string());
                Outcome::Failed(format!("`nvidia-smi {arguments}` failed: {error} ({output})"))
            })),
        }
    }
}

/// An end that is no evidence about the control daemon.
fn no_result(error: &CommandError) -> Option<Outcome> {
    error
        .is_no_result()
        .then(|| Outcome::Unknown(format!("a program of NVIDIA's driver has no result: {error}")))
}
