//! The ends of pods: their containers stop, and their claims are unprepared.

use super::super::world::{MS, SECOND};
use super::{CALL, Kubelet};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The kubelet's loop over claims of inactive pods.
const LOOP: Duration = Duration::from_secs(60);
/// The longest time that the containers of a deleted pod run.
const GRACE: Duration = Duration::from_secs(2);
/// The same for containers that ignore the signal.
const LONG_GRACE: Duration = Duration::from_secs(40);

impl Kubelet {
    pub(super) async fn end_pod(self: Arc<Self>, uid: String, is_forced: bool) {
        let (is_stubborn, is_early) =
            self.world.random(|random| (random.chance(0.2), is_forced && random.chance(0.5)));
        if is_early {
            // The loop over claims of inactive pods comes first.
            self.unprepare_until_done(&uid).await;
        }
        if self.world.machine().runs(&uid) {
            self.world.pause(Duration::ZERO, if is_stubborn { LONG_GRACE } else { GRACE }).await;
            self.world.log(format_args!("the containers of {uid} have ended"));
            self.world.machine().stop_containers(&uid);
        }
        self.unprepare_until_done(&uid).await;
        self.world.pause(Duration::ZERO, 200 * MS).await;
        let now = self.world.moment();
        {
            let mut machine = self.world.machine();
            machine.cgroups.remove(&uid);
            machine.names.remove(&uid);
            machine.change_checkpoint(now.wall, |entries| {
                entries.retain(|entry| entry.pod_uid != uid);
            });
        }
        self.world.cluster().pods.remove(&uid);
    }

    async fn unprepare_until_done(&self, uid: &str) {
        while let Err(why) = self.unprepare(uid).await {
            self.world.log(format_args!("{uid} is not unprepared: {why}"));
            self.world.pause(SECOND, 5 * SECOND).await;
        }
    }

    async fn unprepare(&self, pod: &str) -> Result<(), String> {
        let names: Vec<String> = {
            let claims = self.claims();
            let of_pod = claims.iter().filter(|(_, info)| info.pods.contains(pod));
            of_pod.map(|(name, _)| name.clone()).collect()
        };
        let _locks = self.lock(&names).await;
        let mut batch = Vec::new();
        let ignores_others =
            self.world.habits.unprepares_shared && self.world.random(|random| random.chance(0.3));
        for info in self.claims().values_mut().filter(|info| info.pods.contains(pod)) {
            if info.pods.len() > 1 && !ignores_others {
                info.pods.remove(pod);
            } else {
                batch.push(info.of.clone());
            }
        }
        if !batch.is_empty() {
            let daemon = self.world.daemon().ok_or("DRA driver holdfast.dev is not registered")?;
            for of in &batch {
                // It may be carried out although its answer is lost.
                self.world.oracles().asked_to_unprepare(&of.uid);
            }
            let asked = self.world.handle.timeout(CALL, daemon.unprepare(batch.clone()));
            for (of, answer) in asked.await.ok_or("context deadline exceeded")?? {
                answer?;
                self.world.log(format_args!("{} is unprepared", of.uid));
            }
        }
        {
            let mut claims = self.claims();
            for of in &batch {
                // The kubelet removes the entry of this name and this UID.
                if claims.get(&of.name).is_some_and(|info| info.of.uid == of.uid) {
                    claims.remove(&of.name);
                }
            }
        }
        self.checkpoint();
        Ok(())
    }

    /// The loop over claims whose pods are inactive.
    pub(super) async fn clean_up(self: Arc<Self>) {
        loop {
            self.world.handle.sleep(LOOP).await;
            // Another list of the device plugin, as with each change of a device.
            let now = self.world.moment().wall;
            self.world.machine().change_checkpoint(now, |_| {});
            let inactive: BTreeSet<String> = {
                let (claims, cluster) = (self.claims(), self.world.cluster());
                let pods = claims.values().flat_map(|info| &info.pods);
                let is_away = cluster.is_away;
                pods.filter(|uid| !is_away && !cluster.pods.contains_key(*uid)).cloned().collect()
            };
            for uid in inactive {
                if let Err(why) = self.unprepare(&uid).await {
                    self.world.log(format_args!("the loop cannot unprepare {uid}: {why}"));
                }
            }
        }
    }
}
