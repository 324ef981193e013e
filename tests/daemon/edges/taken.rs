//! Another plugin registers a resource after us. Our streams stay open without any signal, so the
//! daemon compares the kubelet's list with its own.

use crate::common::{soon, until};
use crate::edges::rival_plugin::{RivalBehaviour, RivalPlugin};
use crate::edges::stage::{GPUS, Stage, gpu, on_every_profile, registrations};
use holdfast::app::App;
use holdfast::domain::Grant;
use holdfast::lab::sim::kubelet::PodSpec;
use holdfast::telemetry::metrics;
use holdfast::telemetry::table::Metric;

/// Waits until `status` reports a disagreement that contains this text.
async fn disagreement(app: &App, part: &str) {
    let mut registrations = app.views.registrations.clone();
    let has_part = |text: &String| text.contains(part);
    let reported = registrations.wait_for(|all| {
        all.get(&gpu()).is_some_and(|status| status.disagreement.as_ref().is_some_and(has_part))
    });
    soon(part, reported).await.unwrap();
}

#[test]
fn a_resource_silently_taken_by_another_plugin_is_reclaimed() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        let app = stage.start_app().await;
        let before = stage.kubelet.view(registrations).len();
        let reported = disagreement(&app, "4 of our healthy devices are missing, 4 are not ours");
        let (_rival, ()) =
            tokio::join!(RivalPlugin::with(&stage, RivalBehaviour::OffersOthers), reported);
        assert!(metrics::counted(Metric::Disagreements, &[gpu().as_str(), "list"]) > 0);
        // The kubelet has ended no stream of ours.
        stage.settled_after(before).await;
        let mut registrations = app.views.registrations.clone();
        let agrees = registrations.wait_for(|all| all[&gpu()].disagreement.is_none());
        soon("agreement", agrees).await.unwrap();
        stage.admit_one("after", 1).await;
        assert_eq!(stage.node.grants().len(), 1);
        app.shut_down().await;
    });
}

#[test]
fn another_plugin_that_offers_the_same_devices_is_recognized_by_its_answers() {
    on_every_profile(async |profile| {
        let stage = Stage::new(profile).await;
        // It was here first, and has given a device: that is no disagreement, however often it is
        // seen.
        let first = RivalPlugin::with(&stage, RivalBehaviour::Gives).await;
        stage.admit_one("before", 1).await;
        drop(first);
        let app = stage.start_app().await;
        stage.admit_one("ours", 1).await;
        let before = stage.kubelet.view(registrations).len();
        let _rival = RivalPlugin::with(&stage, RivalBehaviour::Gives).await;
        let given = stage.admit_one("given", 1).await;
        disagreement(
            &app,
            &format!(
                "another plugin has answered for container `main` of the pod with UID {}",
                given.spec.uid
            ),
        )
        .await;
        stage.settled_after(before).await;
        stage.admit(PodSpec::new("default", "after").app("main", &gpu(), 1)).await;
        let others = |grants: &Vec<Grant>| {
            grants.iter().filter(|grant| grant.alloc_id.is_of_other_plugin()).count()
        };
        let all = until(
            "the devices that the other has given",
            || stage.node.grants(),
            |grants| others(grants) == 2,
        );
        let ours = all.await.len() - 2;
        assert_eq!(ours, 2, "of {GPUS} devices two were given by us");
        app.shut_down().await;
    });
}
