//! The service `DRAResourceHealth`, in v1 and v1alpha1. The messages are the same.
//!
//! The end of a stream makes every device of the driver unknown to the kubelet. So a stream ends
//! only with the kubelet's call or with the server.

use super::Claims;
use super::answers::cut;
use crate::domain::ClaimHealth;
use crate::host;
use crate::kubelet::api::LIST_BYTES_MAX;
use crate::kubelet::proto::{dra_health_v1, dra_health_v1alpha1};
use crate::kubelet::services::Services;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use prost::Message;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tonic::{Request, Response, Status};

/// The time after which a list is sent again without a change.
pub(super) const EVERY: Duration = Duration::from_secs(10);

/// Seconds until the kubelet counts a device without a report as unknown: several times [`EVERY`],
/// because a handover or a busy node may delay a list. Read by kubelet 1.35 and newer; an older one
/// waits for 30 s.
pub(super) const TIMEOUT_SECONDS: i64 = 60;

/// Bytes of a message. The kubelet cuts a longer one, also inside a character.
pub(super) const MESSAGE_BYTES_MAX: usize = 1024;

/// Open streams. A kubelet opens one for each socket.
pub(super) const STREAMS_MAX: usize = 16;

/// The service of both versions.
#[derive(Debug, Clone)]
struct Health<C> {
    claims: C,
    streams: Arc<Semaphore>,
    /// The time after which a list is sent again without a change.
    every: Duration,
    /// Becomes true when the server ends.
    closed: watch::Receiver<bool>,
}

/// Adds the service of every version. Its streams end when `closed` becomes true.
pub(super) fn serve<C: Claims>(
    claims: &C,
    closed: watch::Receiver<bool>,
    services: Services,
) -> Services {
    use dra_health_v1::dra_resource_health_server::DraResourceHealthServer as V1;
    use dra_health_v1alpha1::dra_resource_health_server::DraResourceHealthServer as V1Alpha1;
    let health = Health::new(claims.clone(), EVERY, closed);
    services.and(V1::new(health.clone())).and(V1Alpha1::new(health))
}

/// The messages of one call.
type Lists<M> = BoxStream<'static, Result<M, Status>>;

impl<C: Claims> Health<C> {
    fn new(claims: C, every: Duration, closed: watch::Receiver<bool>) -> Self {
        Health { claims, streams: Arc::new(Semaphore::new(STREAMS_MAX)), every, closed }
    }

    /// The list now, after each change, and again after some time without one.
    fn lists<M: Message + 'static>(
        &self,
        message: fn(&[ClaimHealth]) -> M,
    ) -> Result<Lists<M>, Status> {
        let permit = Arc::clone(&self.streams).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!("{STREAMS_MAX} health streams are open already"))
        })?;
        let mut closed = self.closed.clone();
        let closed = async move {
            // An error means that the server has ended.
            drop(closed.wait_for(|closed| *closed).await);
        };
        let every = self.every;
        let lists = stream::unfold(
            (self.claims.health(), true),
            move |(mut health, is_first)| async move {
                if !is_first {
                    tokio::select! {
                        () = changed(&mut health) => {}
                        () = tokio::time::sleep(every) => {}
                    }
                }
                let list = Arc::clone(&health.borrow_and_update());
                Some((list, (health, false)))
            },
        );
        let messages = lists.map(move |list| {
            let _open = &permit;
            Ok(within_size_limit(&list, message))
        });
        Ok(messages.take_until(Box::pin(closed)).boxed())
    }
}

/// Never ends if no change can come.
async fn changed(health: &mut watch::Receiver<Arc<[ClaimHealth]>>) {
    if health.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The list as a message. A list that the kubelet would not accept is sent without texts.
fn within_size_limit<M: Message>(list: &[ClaimHealth], message: fn(&[ClaimHealth]) -> M) -> M {
    let whole = message(list);
    if whole.encoded_len() <= LIST_BYTES_MAX {
        return whole;
    }
    let without_text =
        |device: &ClaimHealth| ClaimHealth { message: String::new(), ..device.clone() };
    message(&list.iter().map(without_text).collect::<Vec<_>>())
}

/// The service in one package.
macro_rules! service {
    ($api:ident, $list:ident) => {
        fn $list(list: &[ClaimHealth]) -> $api::NodeWatchResourcesResponse {
            let seconds = i64::try_from(host::now().wall.0 / 1000).unwrap_or(i64::MAX);
            let device = |device: &ClaimHealth| $api::DeviceHealth {
                device: Some($api::DeviceIdentifier {
                    pool_name: device.name.pool.clone(),
                    device_name: device.name.device.clone(),
                }),
                health: match device.is_healthy {
                    Some(true) => $api::HealthStatus::Healthy,
                    Some(false) => $api::HealthStatus::Unhealthy,
                    None => $api::HealthStatus::Unknown,
                }
                .into(),
                last_updated_time: seconds,
                health_check_timeout_seconds: TIMEOUT_SECONDS,
                message: cut(&device.message, MESSAGE_BYTES_MAX).to_owned(),
            };
            $api::NodeWatchResourcesResponse { devices: list.iter().map(device).collect() }
        }

        #[tonic::async_trait]
        impl<C: Claims> $api::dra_resource_health_server::DraResourceHealth for Health<C> {
            type NodeWatchResourcesStream = Lists<$api::NodeWatchResourcesResponse>;

            async fn node_watch_resources(
                &self,
                _: Request<$api::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                Ok(Response::new(self.lists($list)?))
            }
        }
    };
}

service!(dra_health_v1, list_v1);
service!(dra_health_v1alpha1, list_v1alpha1);

#[cfg(test)]
mod tests {
    use super::super::Answers;
    use super::*;
    use crate::domain::{ClaimRef, DraName, PreparedDevice};
    use futures_util::FutureExt as _;

    /// A driver with health only.
    #[derive(Clone)]
    struct Devices(watch::Receiver<Arc<[ClaimHealth]>>);

    impl Claims for Devices {
        async fn prepare(&self, _: Vec<ClaimRef>) -> Answers<Vec<PreparedDevice>> {
            Vec::new()
        }

        async fn unprepare(&self, _: Vec<ClaimRef>) -> Answers<()> {
            Vec::new()
        }

        fn health(&self) -> watch::Receiver<Arc<[ClaimHealth]>> {
            self.0.clone()
        }
    }

    /// The only test of the repetition, so its time is short.
    #[tokio::test]
    async fn a_list_is_sent_again_without_a_change_and_after_its_source_has_ended() {
        let (source, lists) = watch::channel(Arc::from([device(0, "xid 79".into())]));
        let (close, closed) = watch::channel(false);
        let health = Health::new(Devices(lists), Duration::from_millis(1), closed);
        let mut stream = health.lists(list_v1).unwrap();
        let first = stream.next().await.unwrap().unwrap();
        assert_eq!(stream.next().await.unwrap().unwrap().devices.len(), 1);
        drop(source);
        for _ in 0..3 {
            let again = stream.next().await.unwrap().unwrap();
            assert_eq!(again.devices[0].message, first.devices[0].message);
        }
        close.send_replace(true);
        while stream.next().await.is_some() {}

        // Without a source it waits as long as with one.
        let (_close, closed) = watch::channel(false);
        let mut stream = Health::new(health.claims, EVERY, closed).lists(list_v1).unwrap();
        assert!(stream.next().now_or_never().is_some());
        assert!(stream.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn streams_are_limited_and_an_ended_one_makes_room() {
        let (_source, lists) = watch::channel(Arc::from([]));
        let (_close, closed) = watch::channel(false);
        let health = Health::new(Devices(lists), EVERY, closed);
        let mut open: Vec<_> =
            (0..STREAMS_MAX).map(|_| health.lists(list_v1alpha1).unwrap()).collect();
        let refused = health.lists(list_v1).err().unwrap();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        open.pop();
        assert!(health.lists(list_v1).is_ok());
    }

    fn device(number: usize, message: String) -> ClaimHealth {
        let name = DraName { pool: "n1/gpu".into(), device: format!("gpu-{number}") };
        ClaimHealth { name, is_healthy: Some(false), message }
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let list = list_v1(&[device(0, format!("x{}", "ü".repeat(MESSAGE_BYTES_MAX)))]);
        assert_eq!(list.devices[0].message, format!("x{}", "ü".repeat(511)));
        let list = list_v1alpha1(&[device(0, "y".repeat(MESSAGE_BYTES_MAX))]);
        assert_eq!(list.devices[0].message.len(), MESSAGE_BYTES_MAX, "as long as allowed");
    }

    #[test]
    fn a_list_that_is_too_large_for_the_kubelet_is_sent_without_texts() {
        let list: Vec<ClaimHealth> =
            (0..10_000).map(|number| device(number, "z".repeat(MESSAGE_BYTES_MAX))).collect();
        let sent = within_size_limit(&list, list_v1);
        assert!(sent.encoded_len() <= LIST_BYTES_MAX, "{}", sent.encoded_len());
        assert_eq!(sent.devices.len(), list.len());
        assert_eq!(within_size_limit(&list[..1], list_v1).devices[0].message.len(), 1024);
    }
}
