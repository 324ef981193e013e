//! Every package with one plugin, on one socket: the same answers in different bytes.

use super::*;
use crate::domain::{Attributes, Device, DeviceClass, Health, Offered, Reason, ResourceSpec};
use crate::kubelet::proto::{v1alpha as alpha, v1beta1 as beta};
use crate::kubelet::tracked_stream::TrackedStream;
use crate::kubelet::uds;
use futures_util::TryStreamExt as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Code;

/// A message's bytes.
pub(super) fn hex(message: &impl Message) -> String {
    message.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A resource with these ids, some of them unhealthy.
pub(super) fn offering(ids: &[&str], sick: &[&str]) -> Offering {
    let spec = ResourceSpec::new("example.com/gpu".parse().unwrap(), DeviceClass::Gpu);
    let offered = |id: &&str| {
        let device = Device {
            id: DeviceId::new(*id),
            key: format!("dev:{id}"),
            class: DeviceClass::Gpu,
            pci: None,
            numa_nodes: vec![1],
            nodes: Vec::new(),
            attributes: Attributes::default(),
        };
        let health = if sick.contains(id) {
            Health::Unhealthy(Reason::NodeMissing)
        } else {
            Health::Healthy
        };
        (DeviceId::new(*id), Offered { device: Arc::new(device), health })
    };
    Offering { spec: Arc::new(spec), devices: ids.iter().map(offered).collect() }
}

/// A plugin that sends its lists and then waits. It grants every request with a variable that names
/// the ids, and records the package of each request.
#[derive(Debug, Default)]
struct FakePlugin {
    lists: Vec<Arc<Offering>>,
    wires: Mutex<BTreeSet<&'static str>>,
    /// The ids of PreStartContainer calls; `None` for a resource without such a hook.
    pre_start: Option<Mutex<Vec<DeviceId>>>,
}

#[tonic::async_trait]
impl Plugin for FakePlugin {
    fn lists(&self) -> Result<BoxStream<'static, Arc<Offering>>, Status> {
        Ok(futures_util::stream::iter(self.lists.clone())
            .chain(futures_util::stream::pending())
            .boxed())
    }

    async fn allocate(
        &self,
        containers: Vec<Vec<DeviceId>>,
        wire: ApiCapabilities,
    ) -> Result<Vec<ContainerEdits>, Status> {
        self.wires.lock().unwrap().insert(wire.api);
        let edits = |ids: Vec<DeviceId>| {
            let ids: Vec<_> = ids.iter().map(ToString::to_string).collect();
            let envs = BTreeMap::from([("IDS".to_owned(), ids.join(","))]);
            ContainerEdits { envs, ..ContainerEdits::default() }
        };
        Ok(containers.into_iter().map(edits).collect())
    }

    fn preferred(
        &self,
        available: Vec<DeviceId>,
        _: Vec<DeviceId>,
        size: usize,
    ) -> Result<Vec<DeviceId>, Status> {
        Ok(available.into_iter().take(size).collect())
    }

    fn needs_pre_start(&self) -> bool {
        self.pre_start.is_some()
    }

    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status> {
        self.pre_start.iter().for_each(|prepared| prepared.lock().unwrap().extend(ids.clone()));
        Ok(())
    }
}

/// Serves a plugin on a socket of its own.
async fn served(plugin: &Arc<FakePlugin>) -> (tempfile::TempDir, Channel) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("plugin.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let plugin: Arc<dyn Plugin> = plugin.clone();
    tokio::spawn(Server::builder().serve_with_incoming(serve(&plugin), incoming));
    (dir, uds::connect(socket).await.unwrap())
}

#[tokio::test]
async fn a_connection_that_closes_after_the_options_and_before_the_lists_is_reported() {
    for (asks_for_options, asks_for_lists, is_reported) in
        [(true, false, true), (true, true, false), (false, true, false), (false, false, false)]
    {
        let plugin: Arc<dyn Plugin> = Arc::new(FakePlugin {
            lists: vec![Arc::new(offering(&["a"], &[]))],
            ..FakePlugin::default()
        });
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("plugin.sock");
        let (closed_early, mut reports) = tokio::sync::mpsc::unbounded_channel();
        let on_early_close: Arc<dyn Fn() + Send + Sync> =
            Arc::new(move || closed_early.send(()).unwrap_or_default());
        // One connection only: after its end no other can report.
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap()).take(1);
        let incoming = incoming.map_ok(move |stream| {
            TrackedStream::new(stream, Arc::default(), Arc::clone(&on_early_close))
        });
        tokio::spawn(Server::builder().serve_with_incoming(serve(&plugin), incoming));

        let mut kubelet = beta::device_plugin_client::DevicePluginClient::new(
            uds::connect(socket).await.unwrap(),
        );
        if asks_for_options {
            kubelet.get_device_plugin_options(beta::Empty {}).await.unwrap();
        }
        if asks_for_lists {
            kubelet
                .list_and_watch(beta::Empty {})
                .await
                .unwrap()
                .into_inner()
                .message()
                .await
                .unwrap();
        }
        drop(kubelet);
        assert_eq!(
            reports.recv().await.is_some(),
            is_reported,
            "options {asks_for_options}, lists {asks_for_lists}"
        );
        assert_eq!(reports.recv().await, None, "once");
    }
}

#[test]
fn every_version_has_a_name_of_its_own_and_v1beta1_comes_first() {
    let names: Vec<_> = versions().map(Version::name).collect();
    assert_eq!(names, ["v1beta1", "v1alpha2", "v1alpha1"]);
}

#[tokio::test]
async fn one_socket_answers_every_package_from_one_plugin() {
    let plugin = Arc::new(FakePlugin {
        lists: vec![Arc::new(offering(&["a", "b"], &["b"]))],
        ..FakePlugin::default()
    });
    let (_dir, channel) = served(&plugin).await;
    let mut beta = beta::device_plugin_client::DevicePluginClient::new(channel.clone());
    let mut alpha = alpha::device_plugin_client::DevicePluginClient::new(channel);

    let list = beta
        .list_and_watch(beta::Empty {})
        .await
        .unwrap()
        .into_inner()
        .message()
        .await
        .unwrap()
        .unwrap();
    let beta_list: Vec<_> =
        list.devices.iter().map(|device| (device.id.as_str(), device.health.as_str())).collect();
    assert_eq!(beta_list, [("a", "Healthy"), ("b", "Unhealthy")]);
    let list = alpha
        .list_and_watch(alpha::Empty {})
        .await
        .unwrap()
        .into_inner()
        .message()
        .await
        .unwrap()
        .unwrap();
    let alpha_list: Vec<_> =
        list.devices.iter().map(|device| (device.id.as_str(), device.health.as_str())).collect();
    assert_eq!(alpha_list, beta_list);

    let ids = || vec!["a".to_owned(), "b".to_owned()];
    let containers = vec![
        beta::ContainerAllocateRequest { devices_ids: ids() },
        beta::ContainerAllocateRequest::default(),
    ];
    let answer = beta
        .allocate(beta::AllocateRequest { container_requests: containers })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.container_responses.len(), 2);
    let flat =
        alpha.allocate(alpha::AllocateRequest { devices_i_ds: ids() }).await.unwrap().into_inner();
    assert_eq!(flat.envs, answer.container_responses[0].envs);
    assert_eq!(*plugin.wires.lock().unwrap(), BTreeSet::from(["v1alpha", "v1beta1"]));
}

#[tokio::test]
async fn pre_start_is_requested_only_if_the_plugin_needs_it() {
    for pre_start in [None, Some(Mutex::default())] {
        let is_wanted = pre_start.is_some();
        let plugin = Arc::new(FakePlugin { pre_start, ..FakePlugin::default() });
        let (_dir, channel) = served(&plugin).await;
        let mut beta = beta::device_plugin_client::DevicePluginClient::new(channel);
        let options = beta.get_device_plugin_options(beta::Empty {}).await.unwrap().into_inner();
        assert_eq!(
            (options.pre_start_required, options.get_preferred_allocation_available),
            (is_wanted, true)
        );
        beta.pre_start_container(beta::PreStartContainerRequest { devices_ids: vec!["a".into()] })
            .await
            .unwrap();
        let prepared = plugin.pre_start.as_ref().map(|prepared| prepared.lock().unwrap().clone());
        assert_eq!(prepared, is_wanted.then(|| vec![DeviceId::new("a")]));
    }
}

#[tokio::test]
async fn a_list_above_the_size_limit_is_left_out() {
    let ids: Vec<String> = (0..40_000).map(|number| format!("{number:0>100}")).collect();
    let huge = offering(&ids.iter().map(String::as_str).collect::<Vec<_>>(), &[]);
    let plugin = Arc::new(FakePlugin {
        lists: vec![Arc::new(huge), Arc::new(offering(&["a"], &[]))],
        ..FakePlugin::default()
    });
    let (_dir, channel) = served(&plugin).await;
    let mut alpha = alpha::device_plugin_client::DevicePluginClient::new(channel);
    let list = alpha
        .list_and_watch(alpha::Empty {})
        .await
        .unwrap()
        .into_inner()
        .message()
        .await
        .unwrap()
        .unwrap();
    assert_eq!(list.devices.len(), 1);
}

#[tokio::test]
async fn an_unknown_package_is_unimplemented() {
    let (_dir, channel) = served(&Arc::new(FakePlugin::default())).await;
    let mut client = crate::kubelet::proto::podresources_v1::pod_resources_lister_client::PodResourcesListerClient::new(channel);
    let error = client
        .list(crate::kubelet::proto::podresources_v1::ListPodResourcesRequest {})
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
}
